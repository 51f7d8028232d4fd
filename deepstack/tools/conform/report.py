"""The result of a comparison: its numbers, and the first disagreement in words."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepstack.schemes import SCHEMES
from deepstack.tools.conform.sets import CheckSet

DEPTH = 96  # of the effect


@dataclass(frozen=True)
class Difference:
    """The first disagreement of a block with the reference.

    check: forward, gradients, start or update.
    key: a short name of the cause.
    size: in words.
    cause: in words, with its numbers.
    equation: of the scheme.
    line: file:line of the reference.
    effect: at 96 layers.
    """

    check: str
    key: str
    size: str
    cause: str
    equation: str
    line: str
    effect: str


@dataclass
class Report:
    """The comparison of a block with a scheme.

    numbers: the set of checks.
    rows: check, depth, quantity, largest difference, tolerance, and whether they agree.
    notes: on values that were not compared.
    layout: of the block's rotary positions in words, or ''.
    difference: the first disagreement, or None.
    """

    block: str
    scheme: str
    numbers: CheckSet = field(default_factory=CheckSet)
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    layout: str = ""
    difference: Difference | None = None
    seconds: float = 0.0

    @property
    def label(self) -> str:
        """The scheme's label."""
        return SCHEMES[self.scheme].label

    @property
    def passed(self) -> int:
        """The number of rows that agree."""
        return sum(row["agrees"] for row in self.rows)

    @property
    def count_text(self) -> str:
        """The rows that agree, of those compared: '53 of 53 checks'."""
        return f"{self.passed} of {len(self.rows)} checks"

    def summary(self) -> list[dict[str, Any]]:
        """Return a row for each check and depth: how many quantities, and the worst of them."""
        groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in self.rows:
            groups.setdefault((row["check"], row["depth"]), []).append(row)
        table = []
        for (check, depth), rows in groups.items():
            worst = max(rows, key=excess)
            named = {"check": check, "depth": depth, "compared": len(rows)}
            table.append(named | {key: worst[key] for key in ("of", "difference", "allowed")})
        return table

    @property
    def text(self) -> str:
        """The result in words: one line if the block agrees, else the first disagreement."""
        label = self.label
        if self.difference is None:
            layout = f", with {self.layout}" if self.layout else ""
            return f"{self.block} computes {label} in all {len(self.rows)} comparisons{layout}"
        d = self.difference
        lines = {
            "size": d.size,
            "cause": d.cause,
            "equation": d.equation,
            "reference": d.line,
            f"at {DEPTH} layers": d.effect,
        }
        if self.layout:
            lines["beside"] = self.layout
        head = f"{self.block} does not compute {label}: {d.check} differs"
        return "\n".join([head, *(f"  {name:<12} {value}" for name, value in lines.items())])


def excess(row: Mapping[str, Any]) -> float:
    """Return a difference over the allowed one, infinite for one that is not a number."""
    ratio = float(row["difference"] / (row["allowed"] or 1e-300))
    return math.inf if math.isnan(ratio) else ratio
