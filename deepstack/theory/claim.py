"""What a claim is: a formula, what it predicts, what was measured, a verdict by a fixed rule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from deepstack.errors import PluginError
from deepstack.registry import Registry

# Standard errors within which a prediction and a mean of draws agree, by their number less one:
# Student's t at 99.73 %, what 3 is of a normal distribution (JCGM 100:2008, Table G.2).
SURE = (235.80, 19.21, 9.22, 6.62, 5.51, 4.90, 4.53, 4.28, 4.09, 3.96, 3.85, 3.76, 3.69, 3.64, 3.59,
        3.54, 3.51, 3.48, 3.45, 3.42)  # fmt: skip

Relation = Literal["=", "<=", ">="]
Verdict = Literal["holds", "holds as a bound", "holds in part", "does not hold"]


class Source(NamedTuple):
    """A document that states claims: its title, its address, and the papers that it is about."""

    title: str
    address: str
    papers: str = ""


@dataclass(frozen=True)
class Part:
    """One number that a claim predicts: what it is, predicted, measured ± uncertainty.

    relation: what the claim says of the measured number, '=', '<=' or '>=' the prediction.
    uncertainty: one standard error of `measured`; draws: of how many it was estimated, 0 where it
    is known otherwise.  tolerance: the relative difference that the
    claim itself allows ('about', 'for large d'), 0 where it claims equality.
    stated: False for what the claim does not state and the report shows beside it: such a part has
    no say in the verdict.
    """

    what: str
    predicted: float
    measured: float
    uncertainty: float
    relation: Relation = "="
    tolerance: float = 0.0
    stated: bool = True
    draws: int = 0

    @classmethod
    def mean(
        cls, what: str, predicted: float, draws: Sequence[float] | Tensor, **more: Any
    ) -> Part:
        """A part whose measured number is the mean of independent draws, ± its standard error."""
        values = torch.as_tensor(draws, dtype=torch.float64)
        error = values.std().item() / math.sqrt(len(values))
        return cls(what, predicted, values.mean().item(), error, draws=len(values), **more)

    @property
    def agrees(self) -> bool:
        """Whether the measured number is what the claim says, to its uncertainty and tolerance."""
        slack = sure(self.draws) * self.uncertainty + self.tolerance * abs(self.predicted)
        if not math.isfinite(self.measured):
            return False
        if self.relation == "=":
            return abs(self.measured - self.predicted) <= slack
        if self.relation == "<=":
            return self.measured <= self.predicted + slack
        return self.measured >= self.predicted - slack


def sure(draws: int) -> float:
    """The number of standard errors, of a mean of so many draws, that count as agreement."""
    if not draws:
        return 3.0
    if draws - 2 < len(SURE):
        return SURE[draws - 2]
    free = draws - 1  # Cornish and Fisher's expansion about the normal distribution, at 3
    return 3 + 7.5 / free + 17.25 / free**2


class Line(NamedTuple):
    """A line of a claim's chart: points joined, or alone where `measured`."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    measured: bool = True
    error: Sequence[float] | None = None

    @classmethod
    def mean(cls, label: str, x: Sequence[float], draws: Tensor, measured: bool = True) -> Line:
        """The mean of draws (count, len(x)) at each x, ± its standard error."""
        error = (draws.std(dim=0) / math.sqrt(len(draws))).tolist()
        return cls(label, x, draws.mean(dim=0).tolist(), measured, error)


@dataclass(frozen=True)
class Curves:
    """What a claim shows as a chart: axis labels with symbols and units, and lines."""

    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Finding:
    """What came out of a claim's experiment.

    note: one to three sentences: what was done (sizes, number of draws), and where the claim does
    not hold as stated, why.
    """

    parts: Sequence[Part]
    note: str
    curves: Curves | None = None

    @property
    def verdict(self) -> Verdict:
        """Of the stated parts: all agree ('as a bound' if none is an equality), some, or none."""
        stated = [part for part in self.parts if part.stated]
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

    def measure(self, seed: int = 0) -> Finding:
        """Make the experiment; the same seed gives the same numbers.

        Raises PluginError where it gives no Finding, or one that says nothing.
        """
        found = self.experiment(seed)
        if not isinstance(found, Finding):
            kind = type(found).__name__
            raise PluginError(f"claim {self.id}: its experiment returned {kind}, no Finding")
        if not any(part.stated for part in found.parts):
            raise PluginError(f"claim {self.id}: its Finding has no part that the claim states")
        return found


CLAIMS: Registry[Claim] = Registry("claim")


def all_claims() -> list[Claim]:
    """Every claim, C1, C2, …, in the order of their numbers."""
    return [CLAIMS[name] for name in sorted(CLAIMS, key=lambda name: (len(name), name))]


def claim(id: str, source: Source) -> Callable[[Experiment], Experiment]:
    """Register an experiment, (seed) -> Finding, whose docstring opens with the formula."""

    def register(function: Experiment) -> Experiment:
        formula = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
        CLAIMS.register(id, Claim(id, formula, source, function))
        return function

    return register
