"""The parts of an answer: its sentence, how sure it is, and the runs that would decide it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deepstack.runs import Best, Mean, words
from deepstack.runs import joined as joined
from deepstack.tools.answer.looks import FIXED, Looks

MOST_NAMES = 4  # settings that a sentence names

Kind = Literal["run", "settings", "depths", "rates"]


@dataclass(frozen=True)
class More:
    """Further runs that would decide a question.

    cells: the settings and depths that need them, with all their rates if `all_rates`.
    seeds: number of further seeds of each; 0 where rates are missing.
    rates: further learning rates, for the seeds that are there.
    depth: a further depth of their settings, for so many of their seeds; None for their own.
    reason: the end of a sentence that begins with the number of runs.
    """

    cells: Sequence[Best]
    seeds: int
    reason: str
    rates: Sequence[float] = ()
    all_rates: bool = False
    depth: int | None = None

    @property
    def runs(self) -> int:
        """The number of further runs."""
        if self.rates:
            return len(self.rates) * sum(cell.seeds for cell in self.cells)
        return self.seeds * sum(len(c.tried) if self.all_rates else 1 for c in self.cells)


@dataclass(frozen=True)
class Found:
    """The statement of a study.

    kind: run, settings, depths or rates: the axes that vary.
    sentence: one sentence with its intervals and numbers of seeds.
    decided: whether the interval of the comparison excludes 0; True without a comparison.
    sure: sentences on how sure it is.
    details: further sentences.
    more: the runs that would decide an open question, None if none is open or too many are needed.
    batch: further runs up to the next look, if the study grows and a question is open.
    better: the setting that the interval of a comparison shows to be better, or ''.
    """

    kind: Kind
    sentence: str
    decided: bool
    sure: Sequence[str] = ()
    details: Sequence[str] = ()
    more: More | None = None
    batch: Sequence[More] = ()
    better: str = ""


def some_names(names: Sequence[str]) -> str:
    """Return the first of these names as words, and the number of the others."""
    if len(names) <= MOST_NAMES:
        return joined(names)
    return joined([*names[:MOST_NAMES], f"{len(names) - MOST_NAMES} more"])


def depths_text(depths: Sequence[int]) -> str:
    """Return depths in words: 'N = 6, 48 and 200'."""
    return f"N = {joined([str(depth) for depth in depths])}"


def interval_text(mean: Mean, unit: str = words.PAIRS, looks: Looks = FIXED) -> str:
    """Return '95 % interval 0.28 to 0.35, 5 pairs of seeds', or why there is none."""
    return words.interval_text(mean, unit, name=looks.name, least=looks.least)


def share_text(learnt: int, seeds: int) -> str | None:
    """Return what so many seeds of one setting say about its other seeds; None where not all agree.

    If all of n seeds end alike, the share of such seeds is above 0.05^(1/n) with 95 %: the exact
    bound of Clopper and Pearson (1934).
    """
    if learnt not in (0, seeds):
        return None
    share = 0.05 ** (1 / seeds)
    verb, would = ("learned", "would") if learnt else ("did not learn", "would not")
    return (
        f"Where {seeds} of {seeds} seeds {verb}, with 95 % confidence more than "
        f"{math.floor(100 * share)} % of all seeds {would}."
    )
