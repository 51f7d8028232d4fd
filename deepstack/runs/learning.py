"""Counts the seeds of each setting that learnt from context, at its best learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from deepstack.base.text import counted, value_text
from deepstack.records import Run
from deepstack.runs.outcomes import margin, outcome
from deepstack.runs.runs import Runs
from deepstack.runs.series import Series
from deepstack.runs.settings import LR, by_value, edge_of, require


@dataclass(frozen=True)
class Learning:
    """The seeds of one setting and depth that learnt from context, at one learning rate.

    rate: the best one of several, else None.
    edge: 'lowest' or 'highest' if no rate beyond it was tried, or ''.
    gain: mean distance below the loss without context of the seeds that learnt, in nats; 0 for
        none.
    """

    label: str
    depth: int
    rate: float | None
    edge: str
    learnt: int
    seeds: int
    gain: float

    @property
    def rate_text(self) -> str:
        """The rate in words: '0.064', or '0.064, the highest tried'."""
        edge = f", the {self.edge} tried" if self.edge else ""
        return f"{value_text(self.rate)}{edge}"


def learning_of(runs: Runs) -> list[Learning]:
    """Return how many seeds of each setting and depth learnt, at its best rate of several.

    Learning rates of one setting and depth are not settings here.  Runs without an outcome are left
    out.  The best rate is the one at which most seeds learn; among ties, the least mean loss wins.
    """
    known = runs.keep(lambda run: outcome(run) is not None)
    rows = []
    for series in known.series(but=[LR]):
        label = series.label.replace("\u00a0", " ")
        for depth in series.depths:
            there = series.everything_at(depth)
            by_rate = by_value(there, lambda run: run.get(LR, math.nan))
            best = min(by_rate, key=lambda rate: failure_of(by_rate[rate]))
            several = len(by_rate) > 1
            gains = [-(margin(run) or 0.0) for run in by_rate[best] if outcome(run) == "trained"]
            rows.append(
                Learning(
                    label,
                    depth,
                    best if several else None,
                    edge_of(best, by_rate) if several else "",
                    len(gains),
                    len(by_rate[best]),
                    fmean(gains) if gains else 0.0,
                )
            )
    return rows


def by_success(rows: Sequence[Learning]) -> list[Learning]:
    """Return the settings of which most seeds learn first, then by their gain and name."""
    return sorted(rows, key=lambda one: (-one.learnt / one.seeds, -one.gain, one.label))


def failure_of(seeds: Sequence[Run]) -> tuple[float, float]:
    """Return a key that sorts rates at which most seeds learn first, then the least mean loss."""
    share = sum(outcome(run) == "trained" for run in seeds) / len(seeds)
    ends = [margin(run) if outcome(run) != "diverged" else None for run in seeds]
    return -share, fmean(math.inf if end is None else end for end in ends)


def rate_sentence(rows: Sequence[Learning], most: int) -> str | None:
    """Return a sentence on the best rates of the greatest depth, or None if it has no such rate.

    rows: of `learning_of`.
    most: the number of settings that it names.
    """
    deepest = by_success([one for one in rows if one.depth == max(one.depth for one in rows)])
    if not any(one.rate is not None for one in deepest):
        return None
    words = []
    for one in deepest[:most]:
        if one.rate is not None and not one.learnt:
            words.append(f"{one.label} learns at no rate")
            continue
        where = "" if one.rate is None else f" at its best rate ({one.rate_text})"
        words.append(f"{one.label} learns{where}: {one.learnt} of {counted('{} seeds', one.seeds)}")
    more = f"; and {len(deepest) - most} more" if len(deepest) > most else ""
    return f"At N = {deepest[0].depth}, {'; '.join(words)}{more}."


def runs_by_rate(every: Sequence[Series]) -> dict[tuple[Series, int], dict[float, list[Run]]]:
    """Return the runs of each series and depth at each learning rate, one for each seed.

    Raises NothingMatchedError if no series and depth has two rates.
    """
    cells = {
        (s, n): by_value(s.everything_at(n), lambda run: run.get(LR))
        for s in every
        for n in s.depths
    }
    several = max(map(len, cells.values())) > 1
    require(several, "needs finished runs of two learning rates at one depth")
    return cells
