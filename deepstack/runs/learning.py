"""Counts the seeds of each setting that learnt from context, at its best learning rate."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from deepstack.base.text import counted, value_text
from deepstack.records import Run
from deepstack.runs.outcomes import Result
from deepstack.runs.series import Series
from deepstack.runs.settings import LR, by_value, edge_of, require


@dataclass(frozen=True)
class Learning:
    """The seeds of one setting and depth at one learning rate.

    rate: the best one of several, else None.
    edge: 'lowest' or 'highest' if no rate beyond it was tried, or ''.
    by_seed: seed -> its result.
    tried: rate -> seed -> result, of all rates.
    """

    label: str
    depth: int
    rate: float | None
    edge: str
    by_seed: Mapping[int, Result]
    tried: Mapping[float, Mapping[int, Result]]

    @property
    def rate_text(self) -> str:
        """The rate in words: '0.064', or '0.064, the highest tried'."""
        edge = f", the {self.edge} tried" if self.edge else ""
        return f"{value_text(self.rate)}{edge}"

    @property
    def gains(self) -> list[float]:
        """The distances below the loss without context of the seeds that learnt, in nats."""
        return [-(r.margin or 0.0) for r in self.by_seed.values() if r.outcome == "trained"]

    @property
    def learnt(self) -> int:
        """The number of seeds that learnt from context."""
        return len(self.gains)

    @property
    def seeds(self) -> int:
        return len(self.by_seed)

    @property
    def gain(self) -> float:
        """The mean of `gains`; 0 for none."""
        return fmean(self.gains) if self.gains else 0.0


def learning_of(results: Iterable[Result]) -> list[Learning]:
    """Return the seeds of each setting and depth, at its best rate of several.

    Results with neither an outcome nor a loss are left out.  The best rate is the one at which most
    seeds learn; among ties, the least mean loss wins.
    """
    cells: dict[str, dict[int, dict[float, dict[int, Result]]]] = {}
    ended = [
        one for one in results if one.outcome or (one.state == "done" and one.loss is not None)
    ]
    for one in sorted(ended, key=lambda one: one.depth):
        at_rate = cells.setdefault(one.setting, {}).setdefault(one.depth, {})
        at_rate.setdefault(one.rate, {})[one.seed] = one
    rows = []
    order = dict.fromkeys(one.setting for one in ended)
    for label in order:
        for depth, tried in cells[label].items():
            best = min(sorted(tried), key=lambda rate: failure_of(tried[rate].values()))
            several = len(tried) > 1
            edge = edge_of(best, tried) if several else ""
            rate = best if several else None
            rows.append(Learning(label, depth, rate, edge, tried[best], tried))
    return rows


def by_success(rows: Sequence[Learning]) -> list[Learning]:
    """Return the settings of which most seeds learn first, then by their gain and name."""
    return sorted(rows, key=lambda one: (-one.learnt / one.seeds, -one.gain, one.label))


def failure_of(seeds: Collection[Result]) -> tuple[float, float]:
    """Return a key that sorts rates at which most seeds learn first, then the least mean loss."""
    share = sum(one.outcome == "trained" for one in seeds) / len(seeds)
    ends = [one.final_loss - (one.floor or 0.0) for one in seeds]
    return -share, fmean(math.inf if math.isnan(end) else end for end in ends)


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
