"""The looks at a study that grows until its question is decided, and the error that each spends."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from deepstack.base import ResourceError
from deepstack.records import GROWN, LARGEST_TEXT, parse_object, read
from deepstack.records import replace as write
from deepstack.runs import LEAST_SEEDS, Interval, Mean, student

SEEDS = (3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Numbers of seeds at which a growing study is looked at."""
COMPARED = tuple(number for number in SEEDS if number >= 6)
"""Those at which losses are compared: 5 fair coins agree in 6 % of studies, 6 in 3 %."""
FAR = 20
"""Standard deviations from the mean of one further seed that must not level a difference."""
ERROR = 0.05
FEW_LEARN = 0.2  # shares of a setting's seeds that are told apart: this one, and 1 minus it

Ends = TypeVar("Ends", Mean, Interval)


@dataclass(frozen=True)
class Looks:
    """The looks at a study, and the share of studies that may end with a wrong answer.

    number: number of looks; 1 for a study whose number of seeds was fixed.
    error: probability of a wrong statement over all looks.
    depths: whether depths are added between one where a setting learns and one where not.
    interpolated: depth, key and value of the settings that added depths got from their neighbours.

    Student's t is compared with the same nominal level at each look, so chosen that a study without
    a difference crosses it at any of the looks with probability `error`: the group-sequential test
    of Pocock (1977, Biometrika 64, 191).  A study may stop at any time.

    That holds for normal differences.  Few seeds do not show a rare bad one, so an interval is also
    at least as wide as the mean would move by one further seed FAR deviations away.
    docs/answer.md has the false decisions of twelve distributions with both rules.
    """

    number: int = 1
    error: float = ERROR
    depths: bool = False
    interpolated: tuple[tuple[int, str, float], ...] = ()

    @property
    def repeated(self) -> bool:
        return self.number > 1

    @property
    def intervals(self) -> float:
        """The number of independent 95 % intervals that hold together as often as all looks.

        The looks at growing seeds depend on each other.  Over 4 million simulated studies of normal
        values those of COMPARED with error 0.1, 0.05, 0.025, 0.0125, 0.006 and 0.001 count as 3.5,
        3.9, 4.2, 4.4, 4.6 and 4.9; the line of `counted_looks` lies above.
        """
        return (counted_looks(self.error) if self.repeated else 1) * ERROR / self.error

    @property
    def least(self) -> int:
        """The least number of seeds that have an interval."""
        return COMPARED[0] if self.repeated else LEAST_SEEDS

    @property
    def name(self) -> str:
        """The name of its intervals: '95 % interval', or '96 % interval over 6 looks'."""
        looks = f" over {self.number} looks" if self.repeated else ""
        return f"{100 * (1 - self.error):.3g} % interval{looks}"

    @property
    def sentence(self) -> str:
        """The sentence on the looks of a growing study."""
        *first, last = map(str, COMPARED)
        return (
            "The study grows as long as it is open: a comparison is looked at with "
            f"{', '.join(first)} and {last} seeds, and for normal differences its intervals hold "
            f"at all of these looks together with {100 * (1 - self.error):.3g} % (Pocock 1977, "
            "Biometrika 64, 191). They are wide enough that no single further seed within "
            f"{FAR} standard deviations would level a stated difference."
        )

    def counts_sentence(self, cells: int) -> str:
        """Return the sentence on how it is decided whether each of so many cells learns."""
        lead = self.lead(cells)
        return (
            f"A setting learns, or does not, once a lead of {lead} seeds says so: where at most "
            f"one seed in five ends in that way, the lead is reached in {100 * 4.0**-lead:.1g} % "
            "of studies (Wald 1945, Annals of Mathematical Statistics 16, 117)."
        )

    def part(self, share: float) -> Looks:
        """Return the looks for a question that has this share of the error."""
        return replace(self, error=self.error * share) if self.repeated else self

    def with_interpolated(self, depth: int, key: str, value: float) -> Looks:
        """Return the looks with one more interpolated setting."""
        known = {*self.interpolated, (depth, key, value)}
        return replace(self, interpolated=tuple(sorted(known)))

    def widened(self, ends: Ends, seeds: int) -> Ends:
        """Return a 95 % interval over seeds at the level of each look."""
        factor = self.critical(seeds) / student(seeds)
        if factor == 1:
            return ends
        low = ends.value - factor * (ends.value - ends.low)
        return ends._replace(low=low, high=ends.value + factor * (ends.high - ends.value))

    def critical(self, seeds: int) -> float:
        """Return half of an interval in standard errors of the mean; NaN below `least`."""
        if seeds < self.least:
            return math.nan
        of_errors = student(seeds, self.intervals)
        return max(of_errors, FAR * math.sqrt(seeds) / (seeds + 1)) if self.repeated else of_errors

    def after(self, seeds: int, *, compared: bool = False) -> int | None:
        """Return the number of seeds at the next look; None after the last one.

        compared: whether it is a look at losses, for which few seeds are not enough.
        """
        numbers = COMPARED if compared else SEEDS
        return next((number for number in numbers if number > seeds), None)

    def lead(self, cells: int) -> int:
        """Return by how many seeds learning or not learning must lead, for each of so many cells.

        Wald's sequential test (1945, Annals of Mathematical Statistics 16, 117) between shares of
        0.2 and 0.8: with a share of 0.2 or less, a lead of k is ever reached in 4^-k of studies.
        """
        odds = math.log((1 - FEW_LEARN) / FEW_LEARN)
        return math.ceil(math.log(cells / self.error) / odds)


def counted_looks(error: float) -> float:
    """Return as how many independent looks those at COMPARED count, at most."""
    return min(3.9 + 0.28 * math.log2(ERROR / error), len(COMPARED))


FIXED = Looks()


def growing(error: float = ERROR, *, depths: bool = False) -> Looks:
    """Return the looks at a study that grows, to which depths are added or not."""
    return Looks(len(COMPARED), error, depths)


def looks_at(studies: Iterable[Path]) -> Looks:
    """Return the looks at the runs of these studies; those of the least error if several grow.

    Raises ResourceError if a study's until.json is not the one that a sweep writes.
    """
    every = [looks for study in studies if (looks := read_looks(study / GROWN)) is not None]
    return min(every, key=lambda looks: looks.error, default=FIXED)


def read_looks(path: Path) -> Looks | None:
    """Return the looks in a study's until.json; None without the file."""
    text = read(path, LARGEST_TEXT)
    if text is None:
        return None
    try:
        found = parse_object(text)
        error, depths = float(found["error"]), found.get("depths", False) is True
        made = [(int(n), str(key), float(v)) for n, key, v in found.get("interpolated", [])]
    except (ValueError, TypeError, KeyError, OverflowError):
        error, depths, made = math.nan, False, []
    if not 0 < error < 1:
        raise ResourceError(
            f"{path}: found no error between 0 and 1; repeat the sweep with --until decided"
        )
    return replace(growing(error, depths=depths), interpolated=tuple(made))


def write_looks(study: Path, looks: Looks) -> None:
    """Record in a study's folder that it grows, and how."""
    record = {"error": looks.error, "seeds": SEEDS, "depths": looks.depths}
    record |= {"interpolated": looks.interpolated} if looks.interpolated else {}
    write(study / GROWN, f"{json.dumps(record)}\n".encode())
