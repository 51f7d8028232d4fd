"""Powers of depth with which each parameter role moves the function, from attributions of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deepstack.records import Run
from deepstack.runs import TOGETHER, finite_or_none, role_updates, seed_coefficient

if TYPE_CHECKING:
    import pandas as pd

HEAD = "head"  # the role that reads F and so never moves it


class RoleExponent(NamedTuple):
    """The growth of a role's model update with depth, ‖ΔF_role‖ ~ N^exponent at a step.

    role: a parameter role, or `together` for all at once.
    exponent, error: mean over seeds of the slopes of log ‖ΔF_role‖ on log N, and its standard
        error.
    low, high: its 95 % interval (Student's t, three seeds or more).
    curvature, curvature_error: the same of the coefficient of (log N)² in a parabola.
    smallest, largest: mean ‖ΔF_role‖ over seeds at the depths where it is least and greatest.
    linearity: ‖ΔF_role‖ at half the learning rate over that at the full rate, where neither is
        within rounding; 0.5 is linear.
    origin: `initial` if the role's change was applied to θ_0, `current` if it was taken back from
        θ_t, `alone` if the role was trained alone. None for a value that the runs do not determine.
    """

    step: int
    role: str
    exponent: float | None
    error: float | None
    low: float | None
    high: float | None
    curvature: float | None
    curvature_error: float | None
    smallest: float
    largest: float
    linearity: float | None
    seeds: int
    origin: str


@dataclass(frozen=True, kw_only=True)
class DepthExponents:
    """Exponents in depth of each role's part of ‖ΔF‖, from runs at several depths.

    before: runs with a small constant rate and half of it, the same for all depths.
    alone: the same with one trained role each; empty if they were not asked for.
    second: the same for the roles that do not move F from θ_0, with the rates of the others
        corrected; empty if there are none.
    after: runs with corrected rates, empty if they were not asked for.
    """

    depths: tuple[int, ...]
    steps: tuple[int, ...]
    before: list[Run]
    alone: list[Run] = field(default_factory=list)
    second: list[Run] = field(default_factory=list)
    after: list[Run] = field(default_factory=list)

    @cached_property
    def updates(self) -> pd.DataFrame:
        """A row per run, step and role: depth, seed, lr, step, role, value."""
        return role_updates(self.before)

    @cached_property
    def rows(self) -> list[RoleExponent]:
        """The exponents of all roles and of `together`, at each step, before the correction."""
        rows = role_exponents(self.updates, self.steps)
        if self.alone:
            rows = replaced(rows, role_exponents(role_updates(self.alone), self.steps, "alone"))
        if self.second:
            unmoved = unmoved_roles(rows)
            second = role_exponents(role_updates(self.second), self.steps, "current")
            rows = replaced(rows, [row for row in second if row.role in unmoved])
        return rows

    @cached_property
    def rows_after(self) -> list[RoleExponent]:
        """The same with the corrected rates; empty without runs of them."""
        origin = "current" if self.second else "initial"
        return role_exponents(role_updates(self.after), self.steps, origin) if self.after else []

    @cached_property
    def exponents(self) -> dict[str, float]:
        """The exponent of each role: at the first step at which it moves F."""
        rows = self.first_rows
        return {role: row.exponent for role, row in rows.items() if row.exponent is not None}

    @property
    def first_rows(self) -> dict[str, RoleExponent]:
        """The row of each role at the first step at which it moves F."""
        first: dict[str, RoleExponent] = {}
        for row in self.rows:
            if row.role != TOGETHER and row.exponent is not None:
                first.setdefault(row.role, row)
        return first

    def factors_between(self, depth: int, base: int) -> dict[str, float]:
        """Return factors on the roles' rates at `depth` that give each its update at depth `base`.

        Each is interpolated between the depths of the runs from which the role's exponent comes.
        """
        runs = {"initial": self.before, "alone": self.alone, "current": self.second}
        tables = {origin: role_updates(runs[origin]) for origin in self.origins}
        factors: dict[str, float] = {}
        for role, row in self.first_rows.items():
            found = interpolated_factors(tables[row.origin], row.step, depth, base)
            factors |= {role: found[role]} if role in found else {}
        return factors

    @property
    def origins(self) -> set[str]:
        """Where the exponents of the roles come from, see RoleExponent."""
        return {row.origin for row in self.first_rows.values()}

    @property
    def unmoved(self) -> list[str]:
        """The roles without an exponent, but for the head, which is not part of F."""
        return unmoved_roles(self.rows)


def replaced(rows: Sequence[RoleExponent], others: Sequence[RoleExponent]) -> list[RoleExponent]:
    """Return the rows; rows of `others` replace the ones of the same step and role."""
    newer = {(row.step, row.role): row for row in others}
    return [newer.get((row.step, row.role), row) for row in rows]


def role_exponents(
    updates: pd.DataFrame, steps: Sequence[int] = (), origin: str = "initial"
) -> list[RoleExponent]:
    """Return the exponents of every role at every step, of the runs with the largest rate.

    updates: from `role_updates`, over two depths or more; smaller rates give the linearity.
    steps: the steps to take, by default all.
    origin: where the updates were measured, for the rows.  A role that does not move F has no
        exponent.
    """
    chosen = updates[updates["step"].isin(steps)] if steps else updates
    parts: Any = chosen.groupby(["step", "role"], sort=False)
    top = updates["lr"].max()
    rows = []
    for (step, role), table in parts:
        full = table[table["lr"] == top]
        wide = full.pivot_table(index="seed", columns="depth", values="value", sort=False)
        slope, bend = seed_coefficient(wide), seed_coefficient(wide, degree=2)
        values = (slope.value, slope.se, slope.low, slope.high, bend.value, bend.se)
        ends = float(wide.mean().min()), float(wide.mean().max())
        numbers = (*map(finite_or_none, values), *ends, linearity(table), len(wide.dropna()))
        rows.append(RoleExponent._make((int(step), str(role), *numbers, origin)))
    return rows


def unmoved_roles(rows: Sequence[RoleExponent]) -> list[str]:
    """Return the roles that move F at no step, but for the head, which is not part of F."""
    known = {row.role for row in rows if row.exponent is not None} | {TOGETHER, HEAD}
    return [role for role in dict.fromkeys(row.role for row in rows) if role not in known]


def linearity(table: pd.DataFrame) -> float | None:
    """Return the mean ratio of updates at half and at the full learning rate, or None.

    Pairs in which either movement is 0, and so within rounding (`role_updates`), are left out.
    """
    wide = table.pivot_table(index=["depth", "seed"], columns="lr", values="value")
    if len(wide.columns) < 2:
        return None
    half, full = wide.iloc[:, -2], wide.iloc[:, -1]
    ratios = (half / full)[(half > 0) & (full > 0)].dropna()
    return finite_or_none(ratios.mean())


def interpolated_factors(
    updates: pd.DataFrame, step: int, depth: int, base: int
) -> dict[str, float]:
    """Return factors on the roles' rates at `depth` that give each its update at depth `base`.

    Interpolates log ‖ΔF_role‖ (its mean over seeds) linearly in log N between the measured depths;
    the outermost slopes go on beyond them.  Roles that do not move F have no factor.
    """
    chosen = updates[(updates["step"] == step) & (updates["lr"] == updates["lr"].max())]
    factors = {}
    for role, table in chosen.groupby("role", sort=False):
        if role == TOGETHER or table["depth"].nunique() < 2 or not (table["value"] > 0).all():
            continue
        logs = np.log(table["value"]).groupby(table["depth"]).mean()
        x, y = np.log(logs.index.to_numpy(float)), logs.to_numpy(float)
        at_base, at_depth = (line_through(x, y, math.log(n)) for n in (base, depth))
        factors[str(role)] = math.exp(at_base - at_depth)
    return factors


def line_through(x: np.ndarray, y: np.ndarray, at: float) -> float:
    """Return the piecewise linear function through points at `at`, extended at both ends."""
    i = int(np.clip(np.searchsorted(x, at), 1, len(x) - 1))
    slope = (y[i] - y[i - 1]) / (x[i] - x[i - 1])
    return float(y[i] + slope * (at - x[i]))
