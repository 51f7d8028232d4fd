"""Statistics of repeated draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from deepstack.theory.draws import F64


def gather(samples: Iterable[Mapping[str, Tensor | float]]) -> dict[str, Tensor]:
    """Return name -> the values of all samples in fp64, (samples, …)."""
    rows: dict[str, list[Tensor]] = {}
    for sample in samples:
        for name, value in sample.items():
            rows.setdefault(name, []).append(torch.as_tensor(value, dtype=F64))
    return {name: torch.stack(values) for name, values in rows.items()}


def sweep(
    points: Iterable[int], draws: int, sample: Callable[[int], Mapping[str, Tensor | float]]
) -> dict[str, Tensor]:
    """Return name -> the values of this many samples at each point, (draws, points, …)."""
    drawn = [gather(sample(point) for _ in range(draws)) for point in points]
    return {name: torch.stack([at[name] for at in drawn], dim=1) for name in drawn[0]}


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
