"""Somebody else's models and training loop: for the tests of the probe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import deepstack
from deepstack.records import Run
from deepstack.tools.probe.probe import Probe

D = 16


def encoder(depth: int = 3, *, first: bool = False, dropout: float = 0.1) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        D, 2, 24, dropout=dropout, batch_first=True, norm_first=first
    )
    norm = nn.LayerNorm(D) if first else None
    model = nn.TransformerEncoder(layer, depth, norm=norm, enable_nested_tensor=False)
    for p in model.parameters():  # nn.TransformerEncoder starts all its layers with equal numbers
        if p.ndim > 1:
            nn.init.xavier_uniform_(p)
    return model


class WithHead(nn.Module):
    """Tokens in, logits out, as most models are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, D)
        self.encoder = encoder(2, first=True)
        self.head = nn.Linear(D, 11)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embedding(tokens)) * scale)
        return out


def batch_of(seed: int) -> Tensor:
    return torch.randn(4, 5, D, generator=torch.Generator().manual_seed(seed))


def adamw(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    after: Callable[[Tensor], None] = lambda loss: None,
) -> None:
    """Somebody's training: a target that is the input turned round."""
    for step in range(1, steps + 1):
        x = batch_of(step)
        optimizer.zero_grad()
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        after(loss)


def probe_of(out: Path, model: nn.Module | None = None, batch: Any = None, **options: Any) -> Probe:
    """A probe of a model (default: a small encoder), with a new optimizer."""
    model = encoder() if model is None else model
    batch = batch_of(0) if batch is None else batch
    return deepstack.probe(model, batch, adamw(model), out=out, **options)


def probed(
    out: Path,
    steps: int = 5,
    model: nn.Module | None = None,
    after: Callable[[Probe, Tensor], None] = lambda probe, loss: probe.step(loss),
    **options: Any,
) -> Run:
    """The run of a probe around a training loop, which calls `after` at every step."""
    with probe_of(out, model, **options) as probe:
        loop(probe.model, probe.optimizer, steps, lambda loss: after(probe, loss))
    return probe.run
