"""Exponents of sizes and changes in width and in depth, and the modules that break a rule."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from deepstack.runs import Mean, finite_or_none, seed_coefficient
from deepstack.tools.coordinates.cells import Cell
from deepstack.tools.coordinates.rules import Module, allowed, verdict

QUANTITIES = ("size", "branch", "own", "relative", "change")
"""The quantities, in the order in which the first break of a module is looked for."""
STEPS = 2  # at which a quantity must break a rule, unless it does so at its first step
OUTSIDE = ("grows", "falls")


class Exponent(NamedTuple):
    """The growth of a quantity of a module: ~ width^exponent or depth^exponent.

    over: width or depth.
    quantity: size, branch, own, relative or change (docs/coordinates.md).
    step: of training; 0 for the start.
    exponent, low, high: mean over seeds of the slopes in log-log, and its 95 % interval.
    least, most: allowed exponents, None without a rule.
    verdict: holds, undecided, grows, falls, or '' without a rule.
    """

    module: str
    over: str
    quantity: str
    step: int
    exponent: float | None
    low: float | None
    high: float | None
    least: float | None
    most: float | None
    verdict: str

    @property
    def excess(self) -> float:
        """The part of the exponent that the rule does not allow."""
        if self.exponent is None or self.least is None or self.most is None:
            return 0.0
        return self.exponent - min(max(self.exponent, self.least), self.most)


def values_table(cells: Iterable[Cell], without: Collection[str]) -> pd.DataFrame:
    """Return a row for each value: width, depth, seed, module, quantity, step, value.

    `relative` is `own` over the size of the output at the start.

    without: modules that are left out.
    """
    rows = [
        {"width": cell.width, "depth": cell.depth, "seed": cell.seed, "module": value.name}
        | {"quantity": value.quantity, "step": value.step, "value": value.value}
        for cell in cells
        for value in cell.values
        if value.name not in without
    ]
    table = pd.DataFrame(rows)
    at = ["width", "depth", "seed", "module"]
    sizes = table[(table["quantity"] == "size") & (table["value"] > 0)]
    own = table[table["quantity"] == "own"].merge(
        sizes[[*at, "value"]], on=at, suffixes=("", "_start")
    )
    own = own.assign(value=own["value"] / own["value_start"], quantity="relative")
    return pd.concat([table, own[table.columns]], ignore_index=True)


def along(table: pd.DataFrame, over: str) -> pd.DataFrame:
    """Return the rows of the models that differ in width, at least depth, or the reverse."""
    other = "depth" if over == "width" else "width"
    return table[table[other] == table[other].min()]


def finite_part(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return the rows of the steps at which all values are finite, and a note on the others."""
    lost = table[~np.isfinite(table["value"])]
    if lost.empty:
        return table, ""
    first = lost.sort_values(["step", "width", "depth"]).iloc[0]
    at = f"width {first['width']}, depth {first['depth']}, seed {first['seed']}"
    note = f"not finite at step {first['step']} ({at}) in {first['module']}"
    note += ": only earlier steps are compared" if first["step"] else ", before training"
    return table[table["step"] < first["step"]], note


def starts_equal(table: pd.DataFrame, over: str) -> bool:
    """Return whether the models of an axis have equal values before training, bit for bit."""
    rows = along(table, over)
    values = rows[rows["step"] == 0].groupby(["module", "quantity", "seed"])["value"]
    return bool((values.min() == values.max()).all())


def exponents(
    table: pd.DataFrame, modules: Sequence[Module], rule: str, tolerance: float
) -> list[Exponent]:
    """Return the exponents of all modules, in order of execution.

    table: from `values_table`; a quantity has an exponent at the steps at which no value is 0.
    """
    rows: list[Exponent] = []
    for over in ("width", "depth"):
        chosen = along(table, over)
        if chosen[over].nunique() < 2:
            continue
        keys = ["module", "quantity", "step"]
        wide = chosen.pivot_table(index=[*keys, "seed"], columns=over, values="value", sort=False)
        groups: Any = wide.groupby(level=keys, sort=False)
        found = {(str(key[0]), str(key[1]), int(key[2])): part for key, part in groups}
        steps = sorted({key[2] for key in found})
        for module, quantity, step in product(modules, QUANTITIES, steps):
            part = found.get((module.name, quantity, step))
            if part is not None and (part.to_numpy() > 0).all():  # no value is missing
                slope = seed_coefficient(part)
                rows.append(exponent_row(module, over, quantity, step, slope, rule, tolerance))
    return rows


def exponent_row(
    module: Module, over: str, quantity: str, step: int, slope: Mean, rule: str, tolerance: float
) -> Exponent:
    """Return the exponent of a quantity with what the rule allows, and its verdict."""
    range_ = allowed(rule, over, quantity, module)
    least, most = range_ or (None, None)
    return Exponent(
        module=module.name,
        over=over,
        quantity=quantity,
        step=step,
        exponent=finite_or_none(slope.value),
        low=finite_or_none(slope.low),
        high=finite_or_none(slope.high),
        least=least,
        most=most,
        verdict=verdict(slope.low, slope.high, range_, tolerance),
    )


def breaks(rows: Sequence[Exponent], modules: Sequence[Module]) -> Iterator[list[Exponent]]:
    """Yield the rows that break the rule for each module, axis and quantity, in order of execution.

    A quantity breaks it at its first step, or at two steps in the same direction: one late step
    alone may come from a model that has learnt its batch.
    """
    groups: dict[tuple[str, str, str], list[Exponent]] = {}
    for row in rows:
        groups.setdefault((row.module, row.over, row.quantity), []).append(row)
    for module in modules:
        for over in ("width", "depth"):
            for quantity in QUANTITIES:
                every = groups.get((module.name, over, quantity), [])
                for way in OUTSIDE:
                    found = [row for row in every if row.verdict == way]
                    if found and (found[0] is every[0] or len(found) >= STEPS):
                        yield found
