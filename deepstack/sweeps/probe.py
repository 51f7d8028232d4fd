"""How long a run will take: a few steps of two shallow stacks, extrapolated in depth."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from deepstack import config as conf
from deepstack.sweeps.plan import Cell
from deepstack.training import timed_steps

DEPTHS = (2, 10)
STEPS = 4
# Beyond this the steps of further shapes are not timed: a plan is to be read soon.
PATIENCE_SECONDS = 60.0
# What changes no step's time: the seed is not in these sections.
NO_MATTER = {
    "steps": 1, "lr": 1.0, "betas": (0.0, 0.0), "eps": 1.0, "schedule": "constant", "max_loss": 1.0,
    "warmup_steps": 0, "lr_factors": {}, "eval_every": 0, "eval_batches": 1,
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
        if late or not device_is_here(config):
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


def device_is_here(config: conf.Config) -> bool:
    """Whether steps timed on this machine are steps of the device that the run asks for."""
    return config.runtime.device != "cuda" or torch.cuda.is_available()


def step_seconds(config: conf.Config, depth: int) -> float:
    """Median time of a training step with its probe at another depth, in seconds."""
    shallow = conf.with_overrides(config, {"model.depth": depth, "train.steps": STEPS})
    times = sorted(step for step in timed_steps(shallow))
    return times[len(times) // 2]
