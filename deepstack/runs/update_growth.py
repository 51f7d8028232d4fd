"""The growth of ‖ΔF‖ with depth: local exponents between neighbouring depths, and one for all.

Between depths N and M a seed's exponent is log(‖ΔF_M‖/‖ΔF_N‖) / log(M/N); it is a mean over the
seeds with its 95 % interval.  One exponent for all depths is stated only if the local ones agree:
if their intervals have a common point, and none is wider than WIDEST.  Diverged and saturated
depths are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from deepstack.runs.runs import Runs
from deepstack.runs.series import Series
from deepstack.runs.settings import LR
from deepstack.runs.statistics import (
    Mean,
    ceiling_of,
    has_diverged_by,
    points_of,
    seed_coefficient,
    update_column,
    value_at,
)

WIDEST = 0.5  # of an interval: papers state N^0, N^(1/2) and N, which differ by as much
ROUNDING = 1e-6  # by which the ends of equal intervals may differ: logs have seven digits


class Local(NamedTuple):
    """The exponent of N between two neighbouring depths."""

    first: int
    last: int
    exponent: Mean


class Growth(NamedTuple):
    """The growth of ‖ΔF‖ with depth of one setting.

    label: of the setting.
    step: at which ‖ΔF‖ is measured.
    column: of steps.csv.
    local: exponents between neighbouring depths.
    whole: the exponent over all depths, which counts only if the local ones agree.
    left_out: depths at which ‖ΔF‖ is saturated or a seed has diverged.
    has_rates: whether depths differ in the learning rate.
    """

    label: str
    step: int
    column: str
    local: tuple[Local, ...]
    whole: Mean
    left_out: tuple[int, ...]
    has_rates: bool

    @property
    def has_intervals(self) -> bool:
        """Whether every local exponent has an interval."""
        return all(math.isfinite(one.exponent.low) for one in self.local)

    @property
    def agree(self) -> bool:
        """Whether the intervals of all local exponents have a common point."""
        every = [one.exponent for one in self.local]
        return max(one.low for one in every) <= min(one.high for one in every) + ROUNDING

    @property
    def is_exact(self) -> bool:
        """Whether no local interval is so wide that it holds two laws of papers."""
        return all(one.exponent.high - one.exponent.low <= WIDEST for one in self.local)


def growths_of(runs: Runs, step: int = 1) -> list[Growth]:
    """Return the growth of ‖ΔF‖ at a step for each setting with two depths or more.

    Of several learning rates of a setting and depth, the best one counts.
    """
    chosen = runs.keep(lambda run: len(run.steps)).at_best_rates
    if not chosen:
        return []
    column = update_column(chosen)
    growths = (growth_of(one, step, column) for one in chosen.series(but=[LR]))
    return [growth for growth in growths if growth.local]


def growth_of(series: Series, step: int, column: str) -> Growth:
    """Return the growth of ‖ΔF‖ at a step for one setting.  column: of steps.csv."""
    import pandas as pd

    value = partial(value_at, column=column, step=step)
    ceiling, gone = partial(ceiling_of, column=column), partial(has_diverged_by, step=step)
    points = points_of(series.by_depth, value, ceiling, gone)
    used = points[(points["mark"] == "") & (points["y"] > 0)]
    wide = pd.DataFrame(dict(zip(used["x"], used["by_seed"], strict=True)))
    local = tuple(
        Local(int(n), int(m), exponent)
        for n, m in pairwise(wide.columns)
        if (exponent := seed_coefficient(wide[[n, m]])).n
    )
    return Growth(
        label=series.label.replace("\u00a0", " "),
        step=step,
        column=column,
        local=local,
        whole=seed_coefficient(wide),
        left_out=tuple(sorted({int(x) for x in points["x"]} - {int(x) for x in used["x"]})),
        has_rates=has_rates(series),
    )


def has_rates(series: Series) -> bool:
    """Return whether the depths of a setting differ in the learning rate."""
    return len({run.get(LR) for there in series.by_depth.values() for run in there}) > 1


def steps_of(names: Sequence[str]) -> list[int]:
    """Return the steps in names of panels of `update_vs_depth`: 'DeepNorm: step 5'."""
    texts = (name.rpartition("step ")[2] for name in names)
    return sorted({int(text) for text in texts if text.isdecimal()})
