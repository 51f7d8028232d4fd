"""Claims: a formula, predicted and measured numbers, and a verdict by a fixed rule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from scipy.special import ndtr, stdtrit
from torch import Tensor

from deepstack.base.errors import PluginError
from deepstack.base.registry import Registry
from deepstack.instruments.ledger.draws import THOROUGH, factor

# Widest relative interval that confirms an equality for which the claim gives no tolerance.
RESOLUTION = 0.1

Draws = Sequence[float] | Tensor | float
Relation = Literal["=", "<=", ">="]
Decision = Literal["agrees", "disagrees", "undecided"]
Verdict = Literal["holds", "holds as a bound", "holds in part", "does not hold", "undecided"]


class Source(NamedTuple):
    """A document that states claims: its title, its address, and the papers that it discusses."""

    title: str
    address: str
    papers: str = ""


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


@dataclass(frozen=True)
class Finding:
    """The result of a claim's experiment.

    note: one to three sentences with the sizes and the number of draws, and the reason if the claim
        does not hold as stated.
    """

    parts: Sequence[Part]
    note: str
    curves: Curves | None = None

    @property
    def verdict(self) -> Verdict:
        """Undecided if a stated part is; else by whether all stated parts agree, some or none.

        If all agree the claim holds, 'as a bound' if none of them is an equality.
        """
        stated = [part for part in self.parts if part.stated]
        if any(part.decision == "undecided" for part in stated):
            return "undecided"
        agreeing = [part for part in stated if part.agrees]
        if not agreeing:
            return "does not hold"
        if len(agreeing) < len(stated):
            return "holds in part"
        return "holds" if any(part.relation == "=" for part in stated) else "holds as a bound"


Experiment = Callable[[int], Finding]


@dataclass(frozen=True)
class Claim:
    """A claim: its id, the formula (first line of the experiment's docstring), its source."""

    id: str
    formula: str
    source: Source
    experiment: Experiment = field(repr=False)

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
        if not isinstance(finding, Finding):
            kind = type(finding).__name__
            raise PluginError(f"claim {self.id}: its experiment returned {kind}, no Finding")
        if not any(part.stated for part in finding.parts):
            raise PluginError(f"claim {self.id}: its Finding has no part that the claim states")
        return finding


CLAIMS: Registry[Claim] = Registry("claim")


def all_claims() -> list[Claim]:
    """Return every claim, C1, C2, …, in the order of their numbers."""
    return [CLAIMS[name] for name in sorted(CLAIMS, key=lambda name: (len(name), name))]


def claim(id: str, source: Source) -> Callable[[Experiment], Experiment]:
    """Register an experiment, (seed) -> Finding, whose docstring opens with the formula."""

    def register(function: Experiment) -> Experiment:
        formula = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
        CLAIMS.register(id, Claim(id, formula, source, function))
        return function

    return register
