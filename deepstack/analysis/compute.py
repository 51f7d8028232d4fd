"""Runs by their training FLOPs: budgets, the settings beside them, and the loss at each size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from deepstack.analysis.settings import (
    DEPTH,
    NEVER_DEPTH_SETTINGS,
    depth_of,
    one_run_per_seed,
    setting_value,
    values_of,
    varying_settings,
)
from deepstack.analysis.statistics import training_flops
from deepstack.analysis.transfer import is_inside, vertex
from deepstack.errors import NothingMatchedError
from deepstack.records import ENDED, Run

STEPS, WIDTH = "train.steps", "model.d_model"
# Runs whose FLOPs differ by less have one budget: FLOPs are rounded to whole steps.
SAME_BUDGET = 1.1

Budgets = Mapping[Run, float]
"""Run -> its budget of training FLOPs: the median of runs whose FLOPs are nearly equal."""


def budgets_of(runs: Sequence[Run]) -> Budgets:
    """Return the budget of each finished run with an evaluation and FLOPs in meta.json.

    Raises NothingMatchedError without such a run.
    """
    planned = {
        run: run.meta.get("flops", {}).get("step", math.nan) * int(run.get(STEPS, 0))
        for run in runs
        if run.state in ENDED and len(run.evals)
    }
    known = {run: flops for run, flops in planned.items() if flops > 0}
    if not known:
        raise NothingMatchedError(
            "no finished run has a validation loss, and FLOPs in its meta.json"
        )
    groups: list[list[Run]] = []
    for run in sorted(known, key=lambda run: known[run]):
        if not groups or known[run] > SAME_BUDGET * known[groups[-1][0]]:
            groups.append([])
        groups[-1].append(run)
    middle = [float(median(known[run] for run in group)) for group in groups]
    return {run: budget for group, budget in zip(groups, middle, strict=True) for run in group}


def chosen_settings(budgets: Budgets, but: Sequence[str] = ()) -> list[str]:
    """Return varying settings that make no series: `but`, steps, and settings chosen in each cell.

    A setting is chosen if depth, budget and the others determine it, such as a learning rate.
    """
    runs = list(budgets)
    ignored = [STEPS, *but]
    settings = [key for key in varying_settings(runs) if key not in ignored]
    for key in reversed([k for k in settings if not k.startswith(NEVER_DEPTH_SETTINGS)]):
        places = [DEPTH, *but, *(other for other in settings if other != key)]
        cells = {(budgets[run], values_of(run, places)) for run in runs}
        if len(cells) == len({(budgets[run], values_of(run, [*places, key])) for run in runs}):
            settings.remove(key)
            ignored.append(key)
    return ignored


def by_value(runs: Sequence[Run], value: Callable[[Run], Any]) -> dict[float, list[Run]]:
    """Return the runs at each value, such as a depth or a budget, one for each seed."""
    members: dict[float, list[Run]] = {}
    for run in runs:
        members.setdefault(float(value(run)), []).append(run)
    return {value: one_run_per_seed(members[value]) for value in sorted(members)}


def size_of_axis(runs: Sequence[Run]) -> str:
    """Return the key of the sizes that are compared: the depth, or the width if that alone varies.

    Raises NothingMatchedError if neither varies.
    """
    if len({depth_of(run) for run in runs}) > 1:
        return DEPTH
    if len({setting_value(run, WIDTH) for run in runs}) > 1:
        return WIDTH
    raise NothingMatchedError("needs finished runs of two depths or two widths")


def least_loss(x: Sequence[float], y: Sequence[float]) -> tuple[float, float] | None:
    """Return size and loss at the vertex of the parabola in log x around the least loss.

    None if the least loss has no neighbour on both sides.
    """
    if not len(x):
        return None
    curve = np.log(np.asarray(x, float)), np.asarray(y, float)
    i = int(np.argmin(curve[1]))
    if not is_inside(curve, i):
        return None
    at, loss = vertex(*curve, i)
    return math.exp(at), loss


def made_flops(runs: Sequence[Run]) -> float:
    """Return the mean of the training FLOPs of runs."""
    return float(np.mean([training_flops(run) for run in runs]))
