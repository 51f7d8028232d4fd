"""How long a run will take: a few steps of two shallow stacks, extrapolated in depth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from statistics import median

from deepstack import config as conf
from deepstack.fast import FEW_STEPS, fast_paths_of
from deepstack.sweeps.plan import Cell
from deepstack.training import choose_device, device_is_here, timed_steps

DEPTHS = (2, 10)
# Steps that are timed, and those before them where a step is compiled, captured or recorded.
STEPS, UNSETTLED = 4, 5
# Beyond this the steps of further shapes are not timed: a plan is to be read soon.
PATIENCE_SECONDS = 60.0
# What changes no step's time: the seed is not in these sections.
NO_MATTER = {
    "steps": 1, "lr": 1.0, "betas": (0.0, 0.0), "eps": 1.0, "schedule": "constant", "max_loss": 1.0,
    "warmup_steps": 0, "decay_period": None, "lr_factors": {}, "eval_every": 0, "eval_batches": 1,
}  # fmt: skip


def seconds_per_run(
    cells: Sequence[Cell], *, patience: float = PATIENCE_SECONDS
) -> list[float | None]:
    """Estimated seconds of every cell: steps times (a + b * depth), start-up left out.

    a and b come from timing the two depths above once for every distinct shape of the cells.  None
    for a cell whose device is not here, and for shapes that are left when patience (in seconds) is.
    """
    known: dict[str, tuple[float, float]] = {}
    seconds: list[float | None] = []
    deadline = time.monotonic() + patience
    for cell in cells:
        config, shape = cell.config, shape_of(cell.config)
        late = shape not in known and time.monotonic() > deadline
        if late or not device_is_here(config.runtime):
            seconds.append(None)
            continue
        if shape not in known:
            shallow, deep = (step_seconds(config, depth) for depth in DEPTHS)
            slope = max(deep - shallow, 0.0) / (DEPTHS[1] - DEPTHS[0])
            known[shape] = (max(shallow - slope * DEPTHS[0], 0.0), slope)
        start, slope = known[shape]
        seconds.append(config.train.steps * (start + slope * config.model.depth))
    return seconds


def shape_of(config: conf.Config) -> str:
    """All that the time of a step depends on, but for the depth."""
    model = config.model.model_copy(update={"depth": 1})
    train = config.train.model_copy(update=NO_MATTER)
    return repr((model, config.task, train, config.log, config.runtime))


def step_seconds(config: conf.Config, depth: int) -> float:
    """Median time of a training step with its probe at another depth, in seconds.

    Of steps as the run makes most of them: after the first ones where those set something up.
    """
    ways = fast_paths_of(config, choose_device(config.runtime))
    few = min(config.train.steps, FEW_STEPS)  # as many as make a run take the same ways
    shallow = conf.with_overrides(config, {"model.depth": depth, "train.steps": few})
    first = UNSETTLED if ways.compiled or ways.captured or ways.replayed else 0
    with closing(timed_steps(shallow)) as steps:
        times = list(islice(steps, first + STEPS))
    return median(times[first:] or times)
