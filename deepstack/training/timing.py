"""A few steps of a run in a folder that is thrown away: how long a step takes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from deepstack import config as conf
from deepstack.training.observer import Observer
from deepstack.training.preflight import open_job


def timed_steps(config: conf.Config, *, logged: bool = True) -> Generator[float]:
    """Train step by step as `train` does, but for evaluations and snapshots; yield the seconds.

    logged=False leaves out the probe for ‖ΔF‖ and the row, so that the difference is their cost.
    It ends after `train.steps` steps.  A GPU's results are waited for after each step, so that the
    time is that of the work and not of its launch.
    """
    quiet = {"train.eval_every": 0, "train.eval_batches": 1, "log.layers_every": 0}
    config = conf.with_overrides(config, quiet)
    with (
        tempfile.TemporaryDirectory(prefix="deepstack-") as folder,
        open_job(config, "trial", Path(folder), Observer(), False, "", saves=False) as job,
    ):
        job.begin()
        if not logged:
            job.step = job.make_step(None)
        for step in job.remaining_steps():
            began = time.perf_counter()
            inputs, targets = job.batch(step)
            measured = job.step(inputs, targets, job.learning_rate(step))
            if logged:
                job.record(step, measured)
            float(measured.loss)
            yield time.perf_counter() - began
