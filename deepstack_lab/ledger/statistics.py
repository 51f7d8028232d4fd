"""Statistics of repeated draws."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from timeit import timeit

import torch
from torch import Tensor

from deepstack_lab.ledger.claim import Part
from deepstack_lab.ledger.draws import F64


def gather(samples: Iterable[Mapping[str, Tensor | float]]) -> dict[str, Tensor]:
    """Return name -> the values of all samples in fp64, (samples, …)."""
    rows = list(samples)
    return {
        name: torch.stack([torch.as_tensor(row[name], dtype=F64) for row in rows])
        for name in rows[0]
    }


def sweep(
    points: Iterable[int], draws: int, sample: Callable[[int], Mapping[str, Tensor | float]]
) -> dict[str, Tensor]:
    """Return name -> the values of this many samples at each point, (draws, points, …)."""
    drawn = [gather(sample(point) for _ in range(draws)) for point in points]
    return {name: torch.stack([at[name] for at in drawn], dim=1) for name in drawn[0]}


def means(samples: Iterable[Sequence[Part]]) -> list[Part]:
    """Return the parts of all samples; parts of one name become the mean of their draws."""
    draws: dict[str, list[Part]] = {}
    for part in chain.from_iterable(samples):
        draws.setdefault(part.what, []).append(part)
    return [
        Part.mean(name, (one := parts[0]).predicted, [part.measured for part in parts],
                  null=one.null, relation=one.relation, tolerance=one.tolerance, stated=one.stated)
        for name, parts in draws.items()
    ]  # fmt: skip


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


def per_seed(sample: Callable[[int], object], seeds: Iterable[int]) -> Tensor:
    """Return the numbers, or lists of numbers, of a sample for each seed in fp64, (seeds, …)."""
    return torch.tensor([sample(seed) for seed in seeds], dtype=F64)


def time_ratios(
    one: Callable[[], object], other: Callable[[], object], blocks: int, rounds: int = 8
) -> list[float]:
    """Return ratios of the times of two functions, the shortest of the rounds of each block.

    The two take turns, since other work on the machine only adds time.
    """
    ratios = []
    for _ in range(blocks):
        turns = [(timeit(one, number=1), timeit(other, number=1)) for _ in range(rounds)]
        shortest, shortest_other = map(min, zip(*turns, strict=True))
        ratios.append(shortest / shortest_other)
    return ratios


def crossing(values: Sequence[float], level: float) -> float:
    """Return where values at steps 0, 1, … first cross the level, by a line between two steps.

    A level that is not crossed counts as crossed one step after the last.
    """
    for step, (before, after) in enumerate(pairwise(values)):
        if (before - level) * (after - level) <= 0:
            return step + (level - before) / (after - before)
    return float(len(values))
