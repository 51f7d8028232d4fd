"""A small GPT with a training loop in the style of nanoGPT, without deepstack but for --probe.

    python examples/own_trainer/train.py --n-layer 4 --lr 3e-3 --seed 0
    deepstack sweep examples/own_trainer/study.yaml              # a grid of it, which resumes
    deepstack sweep examples/own_trainer/change.yaml --until decided   # is --zero-init better?
    deepstack sweep examples/own_trainer/probe.yaml              # with ‖ΔF‖ of each step

It reads the bytes of a module of Python.
"""

import argparse
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, BLOCK, BATCH = 32, 4, 32, 16
ITERATIONS, WARMUP, EVAL_EVERY = 100, 10, 25


class Block(nn.Module):
    """Pre-LN attention and feed-forward."""

    def __init__(self, zero_init: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        if zero_init:  # each block begins as the identity
            for layer in (self.c_proj, self.c_out):
                nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """Bytes in, logits out."""

    def __init__(self, n_layer: int, zero_init: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block(zero_init) for _ in range(n_layer))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--n-layer", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zero-init", action="store_true")
    parser.add_argument("--probe", help="folder for the probe's measurements")
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    with open(argparse.__file__, "rb") as file:
        data = torch.tensor(list(file.read()))
    train, val = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

    def get_batch(split: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(split) - BLOCK - 1, (BATCH,), generator=random)
        rows = torch.stack([split[i : i + BLOCK + 1] for i in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    model = GPT(options.n_layer, options.zero_init)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    random = torch.Generator().manual_seed(options.seed)
    probe: Any = nullcontext()
    if options.probe:
        import deepstack  # probe

        batch = get_batch(val, torch.Generator().manual_seed(2))[0]  # probe
        probe = deepstack.probe(model, batch, optimizer, out=options.probe, hidden="ln_f")  # probe
    with probe:
        for it in range(ITERATIONS + 1):
            if it % EVAL_EVERY == 0:
                fixed = torch.Generator().manual_seed(1)
                with torch.no_grad():
                    losses = torch.stack([loss_of(get_batch(val, fixed)) for _ in range(8)])
                print(f"step {it}: val loss {losses.mean():.4f}", flush=True)
            cosine = 0.5 * (1 + math.cos(math.pi * it / ITERATIONS))
            for group in optimizer.param_groups:
                group["lr"] = options.lr * min(1, (it + 1) / WARMUP) * cosine
            loss = loss_of(get_batch(train, random))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if it % 5 == 0:
                print(f"iter {it}: loss {loss.item():.4f}", flush=True)
            if options.probe:
                probe.step(loss)  # probe


if __name__ == "__main__":
    main()
