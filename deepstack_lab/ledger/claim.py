"""Entries of the ledger: published statements, their rules, measured numbers and verdicts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from scipy.special import ndtr, stdtrit
from torch import Tensor

from deepstack.base import PluginError, Registry
from deepstack_lab.ledger.draws import THOROUGH, factor
from deepstack_lab.ledger.order import order
from deepstack_lab.ledger.reach import Extent, Verdict

# Widest relative interval that confirms an equality for which the claim gives no tolerance.
RESOLUTION = 0.1

Draws = Sequence[float] | Tensor | float
Relation = Literal["=", "<=", ">="]
Decision = Literal["agrees", "disagrees", "undecided"]
Tier = Literal["seconds", "cpu", "gpu"]

# The tiers by their cost: one CPU thread for seconds, a CPU for minutes, a GPU.
TIERS: tuple[Tier, ...] = ("seconds", "cpu", "gpu")


class Source(NamedTuple):
    """A document that states claims.

    title, address, authors: its own.
    papers: those that it discusses.
    """

    title: str
    address: str
    papers: str = ""
    authors: str = ""

    @property
    def name(self) -> str:
        """Authors and title."""
        return f"{self.authors}: {self.title}" if self.authors else self.title


class Null(NamedTuple):
    """A null result: the number that would be measured if the claim said nothing, and when."""

    value: float
    meaning: str


@dataclass(frozen=True)
class Part:
    """One number that a claim predicts, and its measured value.

    what: the name of the number.
    relation: of the measured number to the prediction, '=', '<=' or '>='.
    uncertainty: one standard error of `measured`.
    draws: their number, 0 if it is not a mean.
    tolerance: the relative difference that the claim allows ('about', 'for large d'), 0 for an
        equality; an absolute difference if the prediction is 0.
    stated: False for a number that the claim does not state, which the verdict ignores.
    null: the value of a null result, which the claim does not allow.  An inequality may have its
        own bound there.

    Raises PluginError for a null result that satisfies the claim: such a part cannot fail.
    """

    what: str
    predicted: float
    measured: float
    uncertainty: float
    relation: Relation = "="
    tolerance: float = 0.0
    stated: bool = True
    draws: int = 0
    null: Null = field(kw_only=True)

    def __post_init__(self) -> None:
        excess = self._excess(self.null.value)
        if not math.isfinite(excess) or excess < 0 or (excess == 0 and self.relation == "="):
            raise PluginError(
                f"the part {self.what!r}: its null result {self.null.value:.4g} "
                f"({self.null.meaning}) satisfies {self.relation} {self.predicted:.4g} within "
                f"{self.tolerance:.3g}, so that it cannot fail; give a null result beyond that, or "
                "a smaller tolerance"
            )

    @classmethod
    def mean(cls, what: str, predicted: float, draws: Draws, **more: Any) -> Part:
        """Return a part that measures the mean of independent draws, ± its standard error.

        Raises PluginError if there are no draws.
        """
        values = torch.as_tensor(draws, dtype=torch.float64).reshape(-1)
        if not len(values):
            raise PluginError(f"the part {what!r}: found no draws; allowed one or more")
        error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(what, predicted, values.mean().item(), error, draws=len(values), **more)

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the 99.73 % interval of the measured number."""
        half = standard_errors(self.draws) * self.uncertainty
        return self.measured - half, self.measured + half

    @property
    def decision(self) -> Decision:
        """The decision that the 99.73 % interval of the measured number allows.

        disagrees: the whole interval violates the claim.  agrees: the whole interval lies on one
        side of a bound; or it is narrow enough for an equality, the estimate satisfies it, and the
        null result lies outside.  Otherwise undecided.
        """
        return self._judgement[0]

    @property
    def agrees(self) -> bool:
        """Whether the decision is 'agrees'."""
        return self.decision == "agrees"

    @property
    def draws_needed(self) -> int | None:
        """The number of draws that would decide an undecided part; None if decided or unknown.

        Assumes that the estimate and the spread of the draws stay the same.
        """
        return self._judgement[1]

    def _excess(self, value: float) -> float:
        """Return by how much a number violates the claim; negative if it satisfies it."""
        above = value - self.predicted
        beyond = {"=": abs(above), "<=": above, ">=": -above}[self.relation]
        return beyond - self.tolerance * (abs(self.predicted) or 1.0)

    @property
    def _judgement(self) -> tuple[Decision, int | None]:
        interval = standard_errors(self.draws) * self.uncertainty  # half its width
        if not math.isfinite(self.measured):
            return "disagrees", None
        if not math.isfinite(interval):
            return "undecided", None
        excess = self._excess(self.measured)
        if excess > interval:
            return "disagrees", None
        if self.relation != "=":
            if excess < -interval:
                return "agrees", None
            return "undecided", self._draws_for(interval, abs(excess))
        exact = not self.tolerance
        resolution = (self.tolerance or RESOLUTION) * (abs(self.predicted) or 1.0)
        apart = abs(self.measured - self.null.value)
        if (exact or excess <= 0) and interval <= resolution and interval < apart:
            return "agrees", None
        limit = excess if excess > 0 else resolution  # the interval must shrink to it
        limit = max(limit, resolution) if exact else limit
        return "undecided", self._draws_for(interval, min(limit, apart))

    def _draws_for(self, interval: float, limit: float) -> int | None:
        """Return the draws that shrink the interval to the limit; None if unknown."""
        if not limit:
            return None
        return math.ceil(self.draws * (interval / limit) ** 2) or None


# `Part.mean` of a number that the claim does not state (beside), bounds from above (at_most) or
# bounds from below (at_least).
beside = partial(Part.mean, stated=False)
at_most = partial(Part.mean, relation="<=")
at_least = partial(Part.mean, relation=">=")


@dataclass(frozen=True)
class Rule:
    """A number that an entry states, and how its measurement is judged.

    what, predicted, relation, tolerance, stated, null: of the part, see `Part`.
    """

    what: str
    predicted: float
    relation: Relation = "="
    tolerance: float = 0.0
    stated: bool = True
    null: Null = field(kw_only=True)

    def __post_init__(self) -> None:
        self.judge([self.null.value])  # refuses a rule that cannot fail

    def judge(self, draws: Draws) -> Part:
        """Return the part with the mean of these draws, one a seed."""
        return Part.mean(
            self.what,
            self.predicted,
            draws,
            relation=self.relation,
            tolerance=self.tolerance,
            stated=self.stated,
            null=self.null,
        )


def standard_errors(draws: int) -> float:
    """Return half the 99.73 % interval of a mean of draws, in standard errors, by Student's t.

    3 for a normal distribution and for a number that is not a mean (draws = 0); NaN for one
    draw, which shows no spread.
    """
    return float(stdtrit(draws - 1, ndtr(3.0))) if draws else 3.0


@dataclass(frozen=True)
class Line:
    """A line of a claim's chart; if `measured`, separate points."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    measured: bool = True
    error: Sequence[float] | None = None

    @classmethod
    def mean(cls, label: str, x: Sequence[float], draws: Tensor, measured: bool = True) -> Line:
        """Return the mean of draws (count, len(x)) at each x, ± its standard error."""
        error = (draws.std(dim=0) / math.sqrt(len(draws))).tolist()
        return cls(label, list(x), draws.mean(dim=0).tolist(), measured, error)


@dataclass(frozen=True)
class Curves:
    """The chart of a claim: axis labels with symbols and units, and lines."""

    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


class UnmeasuredError(Exception):
    """The runs of an entry cannot show its number; the message says why."""


Drawn = Mapping[str, Sequence[float] | Tensor]
"""The draws of every number that the rules of an entry name, one a seed."""


@dataclass(frozen=True)
class Finding:
    """The result of an entry's experiment.

    note: one to three sentences with the sizes and the number of draws, and the reason if the
        statement does not agree.
    draws: the draws of every part, of an entry with rules.
    """

    parts: Sequence[Part]
    note: str
    curves: Curves | None = None
    draws: Mapping[str, list[float]] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Undecided if a stated part is; else by whether all stated parts agree, some or none."""
        stated = [part for part in self.parts if part.stated]
        if any(part.decision == "undecided" for part in stated):
            return "undecided"
        agreeing = sum(part.agrees for part in stated)
        if not agreeing:
            return "disagrees"
        return "agrees in part" if agreeing < len(stated) else "agrees"


Experiment = Callable[..., Finding | Drawn]


@dataclass(frozen=True)
class Claim:
    """An entry of the ledger: a published statement and the experiment that measures it.

    id: the word that names it, as in C9 or DN-5.
    formula: the statement, the first paragraph of the experiment's docstring.
    source: the document or paper.
    experiment: a function (seed) -> Finding; with rules it returns the draws of each; with a study
        it is given the finished runs in place of the seed.
    tier: the cost of a measurement, see TIERS.
    place: the section, figure or table of the source.
    published: the published numbers, if the formula does not hold them.
    read: how the numbers were read, and their error.
    study: the file of the sweep in studies/ whose runs it measures; "" for none.
    rules: the rule of every number, best fixed before the first run.  An entry without them makes
        its parts in the experiment.
    opposes: ids of the entries that state the contrary.
    source_range: the range of stacks of which the source speaks; None for an exact statement.
    trials: settings of the stacks that an entry without a study trains, each with its steps.
    measured_range: the range of the measurement, if neither study nor trials give it.
    identity: whether the statement holds for every number, so that it cannot fail.
    needs: the thing that a measurement lacks; such an entry is not measured.
    """

    id: str
    formula: str
    source: Source
    experiment: Experiment = field(repr=False)
    tier: Tier = "seconds"
    place: str = ""
    published: str = ""
    read: str = "as printed"
    study: str = ""
    rules: tuple[Rule, ...] = ()
    opposes: tuple[str, ...] = ()
    source_range: Extent | None = None
    trials: tuple[Mapping[str, Any], ...] = ()
    measured_range: Extent | None = None
    identity: bool = False
    needs: str = ""

    def measure(self, seed: int = 0, thorough: bool = False) -> Finding:
        """Run the experiment and return its result; the same arguments give the same numbers.

        thorough: `repeats` gives THOROUGH times as many draws.

        Raises PluginError if it returns no Finding, or one without a stated part.
        """
        token = factor.set(THOROUGH if thorough else 1)
        try:
            finding = self.experiment(seed)
        finally:
            factor.reset(token)
        return self.judge(finding)

    def judge(self, result: Finding | Drawn) -> Finding:
        """Return the finding that the rules make of the draws; a Finding as it is.

        Raises PluginError for another result, missing draws, or a Finding without a stated part.
        """
        finding = self._by_rules(result) if isinstance(result, Mapping) else result
        if not isinstance(finding, Finding):
            kind = type(finding).__name__
            raise PluginError(f"claim {self.id}: its experiment returned {kind}, no Finding")
        if not any(part.stated for part in finding.parts):
            raise PluginError(f"claim {self.id}: its Finding has no part that the claim states")
        return finding

    def _by_rules(self, drawn: Drawn) -> Finding:
        names = [rule.what for rule in self.rules]
        if sorted(names) != sorted(drawn):
            raise PluginError(
                f"claim {self.id}: its experiment returned draws of {', '.join(drawn) or 'none'}; "
                f"its rules name {', '.join(names) or 'none'}"
            )
        draws = {
            name: torch.as_tensor(drawn[name], dtype=torch.float64).reshape(-1).tolist()
            for name in names
        }
        return Finding(
            [rule.judge(draws[rule.what]) for rule in self.rules], self.note, None, draws
        )

    @property
    def note(self) -> str:
        """How an entry with rules is measured: its docstring after the first paragraph."""
        _, _, rest = (inspect.getdoc(self.experiment) or "").partition("\n\n")
        return " ".join(rest.split())


CLAIMS: Registry[Claim] = Registry("claim", hyphens=True)


def all_claims() -> list[Claim]:
    """Return every entry in the order of `order`."""
    return [CLAIMS[name] for name in sorted(CLAIMS, key=order)]


def claim(id: str, source: Source, **more: Any) -> Callable[[Experiment], Experiment]:
    """Register an experiment, (seed) -> Finding, whose docstring opens with the formula.

    more: further fields of `Claim`.
    """

    def register(function: Experiment) -> Experiment:
        formula = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
        CLAIMS.register(id, Claim(id, formula, source, function, **more))
        return function

    return register
