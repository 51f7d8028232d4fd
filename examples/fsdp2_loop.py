"""A loop with torch's fully_shard (FSDP2), with deepstack's probe: the lines marked `# probe`.

    torchrun --nproc-per-node 2 examples/fsdp2_loop.py
    torchrun --nproc-per-node 2 examples/fsdp2_loop.py --resume --steps 40

Each process has a part of every parameter.  Process 0 writes results/fsdp2/run1, with the values of
the whole model.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import deepstack  # probe

WIDTH, VOCABULARY, LENGTH, BATCH, SAVE_EVERY = 32, 16, 12, 8, 5


class Model(nn.Module):
    """A small Transformer that repeats its input, reversed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True) for _ in range(4)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss."""
        x = self.embedding(tokens) + self.position
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.transpose(1, 2), tokens.flip(1))


class Training:
    """Model and optimizer as torch.distributed.checkpoint saves and loads them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default="results/fsdp2/run1")
    parser.add_argument("--checkpoint", default="checkpoints")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def batch_of(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)

    state: dict[str, Any] = {"training": Training(model, optimizer)}
    folder, last = Path(options.checkpoint), 0
    if options.resume:
        last = max(int(path.parent.name) for path in folder.glob("*/.metadata"))
        dcp.load(state, checkpoint_id=folder / str(last))
    probe = deepstack.probe(model, batch_of(0), optimizer, out=options.out, hidden="norm")  # probe
    if options.resume:
        dcp.load({"probe": probe}, checkpoint_id=folder / str(last))  # probe
    state["probe"] = probe  # probe
    with probe:  # probe
        for step in range(last + 1, options.steps + 1):
            loss = model(batch_of(2 * step + dist.get_rank()))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.step(loss)  # probe: the mean over the processes
            if step % SAVE_EVERY == 0:
                dcp.save(state, checkpoint_id=folder / str(step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
