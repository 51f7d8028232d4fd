"""Lets a study grow until its question is decided: looks at it, and asks for the next runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import NamedTuple

from deepstack.runs import Result
from deepstack.tools.answer.found import Found, More
from deepstack.tools.answer.looks import Looks
from deepstack.tools.answer.sentence import find


class Point(NamedTuple):
    """A run of a study: a setting and depth at a learning rate, with a seed."""

    setting: str
    depth: int
    rate: float
    seed: int


@dataclass(frozen=True)
class Growth:
    """A study that has stopped growing.

    runs: number of its runs.
    next: the runs up to the next look, if a limit has stopped it.
    """

    found: Found
    runs: int
    next: Sequence[Point]


def grow(
    measure: Callable[[Sequence[Point]], Sequence[Result]],
    looks: Looks,
    most: int | None = None,
    *,
    refusal: Callable[[Point], str] = lambda point: "",
) -> Growth:
    """Add runs to a study until it is decided, or nothing more can be shown.

    measure: trains further runs, at first none, and returns the results of all runs.
    most: the largest number of runs.
    refusal: returns why a run has no settings; such runs are left out, and the question stays open.

    The runs asked for depend on the results alone, so a study that was interrupted goes on as if it
    had not been.
    """
    points: list[Point] = []
    known: set[Point] = set()
    while True:
        results, before = measure(points), len(known)
        found = find(results, looks=looks)
        known = {Point(one.setting, one.depth, one.rate, one.seed) for one in results}
        points = [] if found.decided else sorted(set(points_of(found.batch)) - known)
        if refused := {point: reason for point in points if (reason := refusal(point))}:
            points = [point for point in points if point not in refused]
            reasons = [f"{reason}." for reason in dict.fromkeys(refused.values())]
            found = replace(found, details=[*found.details, *reasons])
        too_many = most is not None and len(known) + len(points) > most
        if not points or too_many or len(known) == before:
            return Growth(found, len(known), points)


def points_of(batch: Iterable[More]) -> Iterator[Point]:
    """Yield the runs of a batch, also those that exist; the seeds of its cells are paired."""
    for more in batch:
        for cell in more.cells:
            rates = more.rates or (cell.tried if more.all_rates else [cell.value])
            seeds = list(cell.by_seed) if more.rates else paired_seeds(more)
            depth = cell.depth if more.depth is None else more.depth
            yield from (Point(cell.label, depth, rate, seed) for rate in rates for seed in seeds)


def paired_seeds(more: More) -> list[int]:
    """Return the seeds that all cells have after a batch: shared ones, others in use, new ones."""
    if more.depth is not None:
        return sorted(more.cells[0].by_seed)[: more.seeds]
    used = [
        set(by_seed)
        for cell in more.cells
        for by_seed in (cell.tried.values() if more.all_rates else [cell.by_seed])
    ]
    shared, either = set.intersection(*used), set.union(*used)
    new = (seed for seed in count() if seed not in either)
    number = len(shared) + more.seeds
    known = [*sorted(shared), *sorted(either - shared)]
    return [*known, *islice(new, max(number - len(known), 0))][:number]
