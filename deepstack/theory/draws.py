"""Random numbers for an experiment, and what is taken of its repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import Tensor

F64 = torch.float64
ROUNDING = 1e-12  # relative, of sums in fp64
THOROUGH = 8  # times as many draws with `--thorough`
factor: ContextVar[int] = ContextVar("factor", default=1)


def repeats(count: int) -> int:
    """The number of draws of an experiment: count, or THOROUGH times that if asked for."""
    return count * factor.get()


def normals(rng: torch.Generator, *shape: int) -> Tensor:
    """Independent N(0, 1) in fp64."""
    return torch.randn(*shape, generator=rng, dtype=F64)


def power(x: Tensor) -> float:
    """The mean square of all entries."""
    return x.square().mean().item()


def seeds(seed: int, count: int) -> list[int]:
    """Seeds of `repeats(count)` draws; another seed of the experiment gives others."""
    return [(1000 * seed + i) % 2**31 for i in range(repeats(count))]


def random(seed: int, stream: int = 0) -> torch.Generator:
    """A stream of random numbers of its own."""
    return torch.Generator().manual_seed(1000 * seed + stream)


def agreement(a: Tensor, b: Tensor) -> float:
    """1 − ‖a − b‖/‖b‖ over all entries: 1 where a = b."""
    a, b = a.detach().double(), b.detach().double()
    return 1 - ((a - b).norm() / b.norm()).item()


def slope(x: Sequence[float] | Tensor, y: Sequence[float] | Tensor) -> float:
    """Least-squares slope of y against x."""
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (x, y))
    a = a - a.mean()
    return (a @ b / (a @ a)).item()


def exponents(x: Sequence[float], y: Tensor) -> Tensor:
    """The slopes of log y over log x by least squares: y (draws, len(x)) -> (draws,)."""
    at = torch.tensor(x, dtype=torch.float64).log()
    at -= at.mean()
    return (y.double().log() * at).sum(dim=1) / at.square().sum()
