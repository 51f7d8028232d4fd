"""How long a run will take: a few steps of two shallow stacks, extrapolated in depth."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from deepstack import config as conf
from deepstack.diagnostics import ModelUpdate
from deepstack.model import build_model
from deepstack.speed import make_step
from deepstack.sweeps.plan import Cell
from deepstack.tasks import build_task
from deepstack.training import choose_device, make_optimizer, mean_loss, to_device, torch_settings

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
    config = conf.with_overrides(config, {"model.depth": depth})
    device = choose_device(config.runtime)
    task = build_task(
        config.task.name, config.task.options(), seq_len=config.task.seq_len, seed=config.seed
    )
    with torch_settings(config, device):
        built = build_model(config, vocab_size=task.vocab_size, device=device)
        step = make_step(
            lambda inputs, targets: mean_loss(built.model(inputs), targets),
            built.banks,
            built.trained,
            make_optimizer(config.train, built.trained),
            clip=config.train.clip,
            max_loss=config.train.max_loss,
            alive=torch.ones((), device=device),
        )
        probe = to_device(task.probe_batch(config.log.probe_sequences), device)[0]
        update = ModelUpdate(built.model, probe)
        times = []
        for number in range(STEPS):
            began = time.perf_counter()
            step(*to_device(task.train_batch(number + 1, config.train.batch_size), device), 1e-6)
            float(update.measure()["model_update"])
            times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]
