"""Random numbers of the experiments."""

import math
from contextvars import ContextVar

import torch
from torch import Tensor

F64 = torch.float64
D = 64  # width of a stream
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


def rows(rng: torch.Generator, *shape: int) -> Tensor:
    """Return layer-normalised rows of N(0, 1), of width D."""
    return torch.layer_norm(normals(rng, *shape, D), (D,), eps=0.0)


def square(rng: torch.Generator, gain: float) -> Tensor:
    """Return a matrix (D, D) of variance gain²/D."""
    return gain * normals(rng, D, D) / math.sqrt(D)
