"""The result of a coordinate check: exponents, and the first module that breaks the rule."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import pandas as pd

from deepstack.base import counted, signed_text
from deepstack.tools.coordinates.causes import AT_START, cause_of, remedy
from deepstack.tools.coordinates.exponent_fits import Exponent, breaks
from deepstack.tools.coordinates.rules import RULES, Module

WORDS = {
    "size": "size at the start",
    "branch": "output minus input at the start",
    "own": "change by its own parameters",
    "relative": "change by its own parameters over its size",
    "change": "change",
}


class Break(NamedTuple):
    """A module that breaks the rule.

    row: the exponent that shows it, at the first step of those that do.
    cause: usual cause; remedy: what the rule asks for.
    """

    module: str
    over: str
    quantity: str
    row: Exponent
    cause: str
    remedy: str

    @property
    def found(self) -> str:
        """The exponent in words: `change after 3 steps ∝ width^0.98 (0.93 to 1.03), allowed …`."""
        row = self.row
        after = f" after {counted('{} steps', row.step)}" if row.step else ""
        value, low, high = (signed_text(v or 0.0, 2) for v in (row.exponent, row.low, row.high))
        least, most = (signed_text(v or 0.0, 2).rstrip("0").rstrip(".") for v in row[7:9])
        allowed = least if least == most else f"{least} to {most}"
        grown = f"{WORDS[self.quantity]}{after} ∝ {self.over}^{value}"
        return f"{grown} ({low} to {high}); allowed {allowed}"


MOST_ADVISED = 5  # seeds that are advised at least


@dataclass
class CoordinateCheck:
    """The exponents of every module of a model, and the modules that break the rule.

    modules: in order of execution.
    rows: an exponent for each module, axis, quantity and step.
    values: a row for each model, module, quantity and step.
    notes: on values that were not compared.
    """

    name: str
    rule: str
    tolerance: float
    widths: list[int]
    depths: list[int]
    steps: list[int]
    seeds: list[int]
    modules: list[Module]
    rows: list[Exponent]
    values: pd.DataFrame
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @cached_property
    def broken(self) -> list[Break]:
        """The breaks: first those before training, then those after it, in order of execution.

        A wrong start may change gradients, and so the steps of every module; not the reverse.
        """
        by_name = {module.name: module for module in self.modules}
        found = []
        for rows in breaks(self.rows, self.modules):
            module, over, quantity, *_ = rows[0]
            cause = cause_of(rows, by_name, self.rows)
            words = remedy(cause, self.rule, over)
            found.append(Break(module, over, quantity, rows[0], cause, words))
        return sorted(found, key=is_of_training)

    @property
    def first(self) -> Break | None:
        """The first break, or None."""
        return self.broken[0] if self.broken else None

    @property
    def holds(self) -> bool:
        """Whether no module breaks the rule."""
        return not self.broken

    @cached_property
    def frozen(self) -> set[str]:
        """The modules whose own parameters change nothing in any model."""
        own = self.values[self.values["quantity"] == "own"].groupby("module")["value"]
        return {str(name) for name, value in own.max().items() if value == 0}

    @cached_property
    def left_out(self) -> dict[str, list[str]]:
        """Reason -> modules that have no exponent of their change, or of their own change."""
        table = self.values[self.values["quantity"] == "change"]
        by_name = {key: part for key, part in table.groupby("module", sort=False)}
        measured = {row.module for row in self.rows if row.quantity == "change"}
        reasons: dict[str, list[str]] = {}
        for name, part in by_name.items():
            if name in measured:
                if name in self.frozen:
                    reason = "no change by their own parameters, which are not trained"
                    reasons.setdefault(reason, []).append(shown(str(name)))
                continue
            if (part["value"] == 0).all():
                reason = "no change: no trained parameter moves it"
            elif (part["value"] == 0).any():
                reason = "no change in some of the models"
            else:
                reason = "not in all of the models"
            reasons.setdefault(reason, []).append(shown(str(name)))
        return reasons

    @property
    def counts(self) -> dict[str, int]:
        """How many exponents hold, are undecided, or lie outside."""
        words = [row.verdict for row in self.rows if row.verdict]
        outside = len(words) - words.count("holds") - words.count("undecided")
        return {
            "holds": words.count("holds"),
            "undecided": words.count("undecided"),
            "outside": outside,
        }

    @property
    def advice(self) -> str:
        """The modules with most undecided exponents, and what would decide them."""
        names = Counter(shown(row.module) for row in self.rows if row.verdict == "undecided")
        seeds = ",".join(map(str, range(max(2 * len(self.seeds), MOST_ADVISED))))
        few = ", ".join(name for name, _ in names.most_common(3))
        more = f" and {len(names) - 3} modules more" if len(names) > 3 else ""
        return f" ({few}{more}); more seeds decide: --seeds {seeds}"

    def __str__(self) -> str:
        return self.text

    @property
    def text(self) -> str:
        """The result in words: one line if the rule holds, else the first module that breaks it."""
        label, counts = RULES[self.rule], self.counts
        if self.first is None:
            open_ones = counts["undecided"]
            most = "keeps" if 2 * open_ones <= counts["holds"] else "is not shown to break"
            text = (
                f"{self.name} {most} {label}: {counts['holds']} exponents within "
                f"{self.tolerance:g} of the rule, {open_ones} undecided"
            )
            return f"{text}{self.advice}" if open_ones else text
        first = self.first
        names = list(dict.fromkeys(shown(one.module) for one in self.broken))
        lines = {
            "first module": shown(first.module),
            "found": first.found,
            "usual cause": f"{first.cause}: {first.remedy}",
        }
        others = next((one for one in self.broken if one.over != first.over), None)
        if others is not None:
            lines[f"in {others.over}"] = f"{shown(others.module)}: {others.found}; {others.cause}"
        if len(names) > 1:
            lines["later"] = f"{', '.join(names[1:6])}{' …' if len(names) > 6 else ''}"
        head = f"{self.name} breaks {label}: {len(names)} of {len(self.modules)} modules"
        return "\n".join([head, *(f"  {name:<13} {value}" for name, value in lines.items())])

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each module and axis: exponents with half their intervals."""
        cells: dict[tuple[str, str], dict[str, Any]] = {}
        wrong = {(one.module, one.over): one for one in reversed(self.broken)}
        for row in self.rows:
            if row.quantity == "relative":
                continue
            title = row.quantity + (f"_{row.step}" if row.step else "")
            place = row.module, row.over
            named = {"module": shown(row.module), "over": row.over}
            cells.setdefault(place, named)[title] = cell_text(row)
        titles = ["size", "branch"]
        titles += [f"{name}_{step}" for name in ("change", "own") for step in self.steps]
        order = [module.name for module in self.modules]
        rows = []
        for place in sorted(cells, key=lambda p: (order.index(p[0]), p[1] != "width")):
            found = cells[place]
            rows.append(
                {key: found[key] for key in ("module", "over")}
                | {title: found.get(title, "") for title in titles}
                | {"breaks": wrong[place].quantity if place in wrong else ""}
            )
        return [drop_empty(row, rows) for row in rows]

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON holds it."""
        return {
            "holds": self.holds,
            "rule": self.rule,
            "tolerance": self.tolerance,
            "widths": self.widths,
            "depths": self.depths,
            "seeds": self.seeds,
            "steps": self.steps,
            "first": as_dict(self.first),
            "broken": [as_dict(one) for one in self.broken],
            "counts": self.counts,
            "rows": [row._asdict() for row in self.rows],
            "modules": [module._asdict() for module in self.modules],
            "left_out": self.left_out,
            "notes": self.notes,
            "seconds": self.seconds,
        }


def is_of_training(found: Break) -> bool:
    """Return whether a break comes from training, and not from the start of a module."""
    is_start = found.quantity == "relative" and found.cause in AT_START
    return found.row.step > 0 and not is_start


def shown(name: str) -> str:
    """Return the name of a module in words: the model itself has none."""
    return name or "(the model's output)"


def as_dict(found: Break | None) -> dict[str, Any] | None:
    """Return a break as a dict."""
    if found is None:
        return None
    return found._asdict() | {"row": found.row._asdict(), "found": found.found}


def cell_text(row: Exponent) -> str:
    """Return `0.98 ±0.05`: the exponent and half of its interval."""
    if row.exponent is None or row.low is None or row.high is None:
        return "-"
    return f"{signed_text(row.exponent, 2)} ±{(row.high - row.low) / 2:.2f}"


def drop_empty(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a row without the columns that no row has."""
    return {key: v for key, v in row.items() if any(one[key] for one in rows) or key == "breaks"}
