"""Random numbers of the experiments, and statistics of repeated draws."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


def random(seed: int) -> torch.Generator:
    """Return a generator of random numbers for this seed."""
    return torch.Generator().manual_seed(1000 * seed)


def gather(samples: Iterable[Mapping[str, Tensor | float]]) -> dict[str, Tensor]:
    """Return name -> the values of all samples in fp64, (samples, …)."""
    rows: dict[str, list[Tensor]] = {}
    for sample in samples:
        for name, value in sample.items():
            rows.setdefault(name, []).append(torch.as_tensor(value, dtype=F64))
    return {name: torch.stack(values) for name, values in rows.items()}


def agreement(a: Tensor, b: Tensor) -> float:
    """Return 1 − ‖a − b‖/‖b‖ over all entries: 1 if a = b."""
    a, b = a.detach().double(), b.detach().double()
    return 1 - ((a - b).norm() / b.norm()).item()


def slopes(x: Sequence[float] | Tensor, y: Tensor) -> Tensor:
    """Return the least-squares slopes of y against x: y (draws, len(x)) -> (draws,)."""
    at = torch.as_tensor(x, dtype=F64)
    at = at - at.mean()
    return (y.double() * at).sum(dim=1) / at.square().sum()


def exponents(x: Sequence[float], y: Tensor) -> Tensor:
    """Return the least-squares slopes of log y against log x: y (draws, len(x)) -> (draws,)."""
    return slopes(torch.tensor(x, dtype=F64).log(), y.double().log())
