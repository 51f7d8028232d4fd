"""Estimates how long the runs of a sweep take, by timing a few steps of shallow stacks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from itertools import islice
from statistics import median
from typing import Any

from deepstack import config as conf
from deepstack.config.estimate import FEW_STEPS
from deepstack.fast import fast_paths_of
from deepstack.sweeps.plan import Cell
from deepstack.training import choose_device, choose_threads, device_is_here, timed_steps

# Depths of the stacks whose steps are timed.
DEPTHS = (2, 10)
# Timed steps, and steps before them if a step is compiled, captured or recorded.
STEPS, UNSETTLED = 4, 5
# After this time no further shapes are timed, so that the plan appears soon.
PATIENCE_SECONDS = 60.0
# Settings that do not change the time of a step; the seed is not in these sections.
IRRELEVANT = {
    "steps": 1, "lr": 1.0, "betas": (0.0, 0.0), "eps": 1.0, "schedule": "constant", "max_loss": 1.0,
    "warmup_steps": 0, "decay_period": None, "schedule_options": {}, "final_lr_factor": 0.0,
    "lr_factors": {}, "lr_exponents": {},
    "eval_every": 0, "eval_batches": 1,
}  # fmt: skip
# Settings of the model that change no time, and exclude some depths.
OF_OTHER_DEPTHS = {
    "prelude_layers": 0,
    "coda_layers": 0,
    "unique_layers": None,
    "start": None,
    "grow": None,
}


def seconds_per_run(
    cells: Sequence[Cell], *, patience: float = PATIENCE_SECONDS
) -> list[float | None]:
    """Return the estimated seconds of every cell: steps times (a + b * depth), without start-up.

    a and b come from timing two depths once for every distinct shape of the cells.  None for a
    cell whose device is not here, and for shapes not timed within `patience` seconds.
    """
    known: dict[str, tuple[float, float]] = {}
    seconds: list[float | None] = []
    deadline = time.monotonic() + patience
    for cell in cells:
        config, shape = cell.config, shape_of(cell.config)
        can_be_timed = device_is_here(config.runtime) and time.monotonic() <= deadline
        if shape not in known and can_be_timed:
            shallow, deep = (step_seconds(config, depth) for depth in DEPTHS)
            slope = max(deep - shallow, 0.0) / (DEPTHS[1] - DEPTHS[0])
            known[shape] = (max(shallow - slope * DEPTHS[0], 0.0), slope)
        start, slope = known.get(shape, (None, 0.0))
        step = None if start is None else start + slope * config.model.depth
        seconds.append(None if step is None else config.train.steps * step)
    return seconds


def shape_of(config: conf.Config) -> str:
    """Return a key for all settings that change the time of a step, except the depth."""
    model = config.model.model_copy(update={"depth": 1, **OF_OTHER_DEPTHS})
    train = config.train.model_copy(update=IRRELEVANT)
    is_long = config.train.steps >= FEW_STEPS  # 'auto' replays the steps of long runs alone
    return repr((model, config.task, train, config.log, config.runtime, is_long))


def step_seconds(config: conf.Config, depth: int) -> float:
    """Return the median seconds of a training step with its probe at another depth.

    The first steps do not count if they compile, capture or record the later ones.
    """
    device = choose_device(config.runtime)
    paths = fast_paths_of(config, device)
    few = min(max(config.train.steps, 1), FEW_STEPS)  # enough for the same fast paths as the run
    changes: dict[str, Any] = {f"model.{key}": value for key, value in OF_OTHER_DEPTHS.items()}
    # other runs have the other cores
    changes["runtime.threads"] = choose_threads(config, on_gpu=device.type == "cuda")
    if paths.compiled:  # whose rule reads depth and steps
        changes["runtime.compile"] = True
    shallow = conf.with_overrides(config, changes | {"model.depth": depth, "train.steps": few})
    first = UNSETTLED if paths.compiled or paths.captured or paths.replayed else 0
    with closing(timed_steps(shallow)) as steps:
        times = list(islice(steps, first + STEPS))
    return median(times[first:] or times)
