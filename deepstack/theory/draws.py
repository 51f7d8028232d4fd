"""Random numbers of the experiments, and statistics of repeated draws."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

F64 = torch.float64
ROUNDING = 1e-12  # relative, of sums in fp64
THOROUGH = 8  # factor of the number of draws with `--thorough`
factor: ContextVar[int] = ContextVar("factor", default=1)


def repeats(count: int) -> int:
    """Return the number of draws of an experiment: count, THOROUGH times that with --thorough."""
    return count * factor.get()


def normals(rng: torch.Generator, *shape: int) -> Tensor:
    """Return independent draws of N(0, 1) in fp64."""
    return torch.randn(*shape, generator=rng, dtype=F64)


def power(x: Tensor) -> float:
    """Return the mean square of all entries."""
    return x.square().mean().item()


def seeds(seed: int, count: int) -> list[int]:
    """Return a seed for each of `repeats(count)` draws; they depend on the experiment's seed."""
    return [(1000 * seed + i) % 2**31 for i in range(repeats(count))]


def random(seed: int, stream: int = 0) -> torch.Generator:
    """Return a generator of random numbers for this seed and stream."""
    return torch.Generator().manual_seed(1000 * seed + stream)


def agreement(a: Tensor, b: Tensor) -> float:
    """Return 1 − ‖a − b‖/‖b‖ over all entries: 1 if a = b."""
    a, b = a.detach().double(), b.detach().double()
    return 1 - ((a - b).norm() / b.norm()).item()


def slope(x: Sequence[float] | Tensor, y: Sequence[float] | Tensor) -> float:
    """Return the least-squares slope of y against x."""
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (x, y))
    a = a - a.mean()
    return (a @ b / (a @ a)).item()


def exponents(x: Sequence[float], y: Tensor) -> Tensor:
    """Return the least-squares slopes of log y against log x: y (draws, len(x)) -> (draws,)."""
    at = torch.tensor(x, dtype=torch.float64).log()
    at -= at.mean()
    return (y.double().log() * at).sum(dim=1) / at.square().sum()
