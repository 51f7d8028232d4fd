"""The best value of a chosen setting, such as the learning rate, in a cell: the only rule.

The value at which the largest share of seeds learns is best, then the one with the least mean
distance of the final loss from the loss without context, then the smallest one.

| a seed of a value                     | in the share          | in the mean          |
|---------------------------------------|-----------------------|----------------------|
| has learnt                            | counts for the value  | its loss             |
| has not learnt: at chance, worse      | counts against it     | its loss             |
| has diverged                          | counts against it     | infinite             |
| is done, with nothing to compare with | counts against it     | its loss             |
| runs, failed or was interrupted       | not counted           | not counted          |
| was not trained at this value         | not counted           | not counted          |

So a rate at which one of three seeds fails is never better than one at which all learn, however
low its mean; without a reference (no seed counts as learnt) the mean alone decides.  A value
without an ended seed is no candidate.  The best value is at an edge if it is the smallest or the
largest number tried: a better one may lie beyond.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from deepstack.base.text import value_text
from deepstack.records import Run
from deepstack.runs.cells import BySeed, Cell, cells_of
from deepstack.runs.loss_text import in_nats
from deepstack.runs.outcomes import Result

LOWEST, HIGHEST = "lowest", "highest"


@dataclass(frozen=True)
class Best:
    """The seeds of a cell at one of its values, the best one.

    value: None without an ended run.
    edge: LOWEST or HIGHEST if no number beyond the value was tried, or ''.
    """

    cell: Cell
    value: Any
    edge: str

    @property
    def label(self) -> str:
        return self.cell.label

    @property
    def depth(self) -> int:
        return self.cell.depth

    @property
    def tried(self) -> Mapping[Any, BySeed]:
        """Value -> seed -> result, of all values."""
        return self.cell.tried

    @property
    def by_seed(self) -> BySeed:
        """Seed -> its result."""
        return self.cell.tried.get(self.value, {})

    @property
    def is_chosen(self) -> bool:
        """Whether the value was chosen among several."""
        return len(self.tried) > 1

    @property
    def value_text(self) -> str:
        """The value in words: '0.064', or '0.064, the highest tried'."""
        edge = f", the {self.edge} tried" if self.edge else ""
        return f"{value_text(self.value)}{edge}"

    @property
    def values(self) -> dict[str, Any]:
        """The best values by the chosen settings; None without an ended run."""
        if not self.by_seed:
            return dict.fromkeys(self.cell.keys)
        several = self.value if isinstance(self.value, tuple) else (self.value,)
        return dict(zip(self.cell.keys, several, strict=True))

    @property
    def setting_text(self) -> str:
        """The setting with its best values: 'DeepNorm, lr 0.064'."""
        texts = (f"{key.rpartition('.')[2]} {value_text(v)}" for key, v in self.values.items())
        return ", ".join([self.label, *texts])

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

    @property
    def is_judged(self) -> bool:
        """Whether each seed has diverged or has a loss, and there is a loss to compare it with."""
        ends = self.by_seed.values()
        return all(one.outcome for one in ends) and any(one.floor is not None for one in ends)

    @property
    def losses(self) -> dict[int, float] | None:
        """The final loss of each seed in nats; None if a seed has none, or diverged."""
        ends = {seed: one.final_loss for seed, one in self.by_seed.items()}
        return ends if ends and all(map(math.isfinite, ends.values())) else None

    @property
    def unit(self) -> str:
        """' nats', the unit of the losses, or '' for a metric of another trainer."""
        return " nats" if in_nats(self.runs[:1], "") else ""

    @property
    def runs(self) -> list[Run]:
        """The runs at the value by seed, unfinished ones too; without an ended run, all runs."""
        if self.by_seed:
            seeds = {**self.cell.unfinished.get(self.value, {}), **self.by_seed}
            ends = [seeds[seed] for seed in sorted(seeds)]
        else:
            ends = [one for by_seed in self.cell.unfinished.values() for one in by_seed.values()]
        return [one.run for one in ends if one.run is not None]

    def same_cell(self, other: Best) -> bool:
        """Return whether the other one has the same setting and depth."""
        return (self.label, self.depth) == (other.label, other.depth)

    def at_each_value(self) -> list[Best]:
        """Return the seeds at each of the values tried, the best value among them."""
        return [replace(self, value=value) for value in self.tried]


def best_of(cell: Cell) -> Best:
    """Return the seeds of a cell at its best value; see the table of this module."""
    if not cell.tried:
        return Best(cell, None, "")
    rising = sorted(cell.tried, key=order_of_value)
    value = min(rising, key=lambda value: failure_of(cell.tried[value].values()))
    return Best(cell, value, edge_of(value, cell.tried))


def bests_of(results: Iterable[Result]) -> list[Best]:
    """Return the seeds of each setting and depth with an ended run, at the best learning rate."""
    return [best_of(cell) for cell in cells_of(results) if cell.tried]


def failure_of(seeds: Collection[Result]) -> tuple[float, float]:
    """Return a key that sorts values at which most seeds learn first, then the least mean loss."""
    share = sum(one.outcome == "trained" for one in seeds) / len(seeds)
    ends = [one.final_loss - (one.floor or 0.0) for one in seeds]
    return -share, fmean(math.inf if math.isnan(end) else end for end in ends)


def count_diverged(results: Iterable[Result], label: str) -> tuple[int, int]:
    """Return how many seeds of a setting diverged, and how many it has.

    Only seeds at the best learning rate of a setting and depth count.

    label: of the setting, without the values chosen, as in 'candidate'.
    """
    found = [one for one in bests_of(results) if one.label.partition(",")[0] == label]
    states = [end.state for one in found for end in one.by_seed.values()]
    return states.count("diverged"), len(states)


def edge_of(value: Any, tried: Iterable[Any]) -> str:
    """Return LOWEST or HIGHEST if a number is a limit of several that were tried, else ''.

    Of several settings: the edges of their values, each among those tried, joined by commas.
    """
    values = list(tried)
    if isinstance(value, tuple):
        columns = zip(value, zip(*values, strict=True), strict=True)
        return ", ".join(filter(None, (edge_of(one, column) for one, column in columns)))
    numbers = {one for one in values if is_number(one)}
    if len(numbers) < 2 or value not in (min(numbers), max(numbers)):
        return ""
    return LOWEST if value == min(numbers) else HIGHEST


def is_number(value: Any) -> bool:
    """Return whether a value of a setting is a number, which has an order."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def order_of_value(value: Any) -> tuple[Any, ...]:
    """Return a key that sorts values: numbers by size, then others by their text."""
    if isinstance(value, tuple):
        return tuple(order_of_value(one) for one in value)
    return (0, float(value), "") if is_number(value) else (1, 0.0, str(value))


def by_success(rows: Iterable[Best]) -> list[Best]:
    """Return the settings whose best value has the least mean loss first.

    Settings with a diverged seed follow, in the order of the rule of this module.
    """

    def key(one: Best) -> tuple[Any, ...]:
        losses = one.losses
        mean = math.inf if losses is None else fmean(losses.values())
        return mean, failure_of(one.by_seed.values()) if one.by_seed else (0.0, math.inf), one.label

    return sorted(rows, key=key)
