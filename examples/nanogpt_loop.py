"""A loop in the style of nanoGPT, with deepstack's probe: the lines marked `# probe`.

    python examples/nanogpt_loop.py
    torchrun --nproc-per-node 2 examples/nanogpt_loop.py         # DistributedDataParallel
    python examples/nanogpt_loop.py --resume --steps 40          # go on from ckpt.pt

It trains a small GPT on the bytes of this file and shows ‖ΔF‖ with:  deepstack plot results/nanogpt
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import deepstack  # probe

WIDTH, HEADS, LAYERS, BLOCK = 32, 4, 4, 32
BATCH, ACCUMULATE, EVAL_EVERY = 4, 2, 5


class Block(nn.Module):
    """Pre-LN attention and feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Bytes in; logits and loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        targets = tokens if targets is None else targets
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="results/nanogpt/run1")
    parser.add_argument("--checkpoint", default="ckpt.pt")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    ddp = "RANK" in os.environ
    if ddp:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ddp else 0
    torch.manual_seed(1337)
    data = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    train, val = data[:-512], data[-512:]

    def get_batch(split: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(split) - BLOCK - 1, (BATCH,), generator=generator).tolist()
        rows = torch.stack([split[i : i + BLOCK + 1] for i in starts])
        return rows[:, :-1], rows[:, 1:]

    raw_model = GPT()
    model: Any = DistributedDataParallel(raw_model) if ddp else raw_model
    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    iter_num = 0
    saved = torch.load(options.checkpoint) if options.resume else None
    if saved:
        raw_model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        iter_num = saved["iter_num"]

    batch = get_batch(val, 0)[0]
    probe = deepstack.probe(model, batch, optimizer, out=options.out, hidden="ln_f")  # probe
    if saved:
        probe.load_state_dict(saved["probe"])  # probe
    with probe:  # probe
        while iter_num < options.steps:
            lr = 1e-3 * min(1.0, (iter_num + 1) / 5) * 0.5 * (1 + math.cos(iter_num / 50))
            for group in optimizer.param_groups:
                group["lr"] = lr
            total = torch.zeros(())
            for micro_step in range(ACCUMULATE):
                x, y = get_batch(train, 10_000 * rank + ACCUMULATE * iter_num + micro_step)
                if ddp:
                    model.require_backward_grad_sync = micro_step == ACCUMULATE - 1
                loss = model(x, y)[1] / ACCUMULATE
                loss.backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(raw_model.parameters(), 1.0)
            optimizer.step()
            iter_num += 1
            probe.step(total)  # probe
            optimizer.zero_grad(set_to_none=True)
            probe.log(tokens=iter_num * BATCH * BLOCK * ACCUMULATE)  # probe
            if iter_num % EVAL_EVERY == 0:
                with torch.no_grad():
                    raw_model.eval()
                    loss = torch.stack([raw_model(*get_batch(val, i))[1] for i in range(4)]).mean()
                    raw_model.train()
                probe.evaluate(loss)  # probe
                parts = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
                parts |= {"iter_num": iter_num, "probe": probe.state_dict()}  # probe
                if rank == 0:
                    torch.save(parts, options.checkpoint)
    if ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
