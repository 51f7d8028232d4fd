"""How long a run will take: a few steps of two shallow stacks, extrapolated in depth."""

from __future__ import annotations

from collections.abc import Sequence

from deepstack import config as conf
from deepstack.sweeps.plan import Cell
from deepstack.training import timed_steps

DEPTHS = (2, 10)
STEPS = 4


def seconds_per_run(cells: Sequence[Cell]) -> list[float]:
    """Estimated seconds of every cell: steps times (a + b * depth), start-up left out.

    a and b come from timing the two depths above once for every distinct shape of the cells.
    """
    known: dict[str, tuple[float, float]] = {}
    seconds = []
    for cell in cells:
        config = cell.config
        shape = repr((config.model.model_copy(update={"depth": 1}), config.task, config.train))
        if shape not in known:
            shallow, deep = (step_seconds(config, depth) for depth in DEPTHS)
            slope = max(deep - shallow, 0.0) / (DEPTHS[1] - DEPTHS[0])
            known[shape] = (max(shallow - slope * DEPTHS[0], 0.0), slope)
        start, slope = known[shape]
        seconds.append(config.train.steps * (start + slope * config.model.depth))
    return seconds


def step_seconds(config: conf.Config, depth: int) -> float:
    """Median time of a training step with its probe at another depth, in seconds."""
    shallow = conf.with_overrides(config, {"model.depth": depth, "train.steps": STEPS})
    times = sorted(step for step in timed_steps(shallow))
    return times[len(times) // 2]
