"""A few steps of a run in a folder that is thrown away: how long a step takes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from deepstack import config as conf
from deepstack.training.job import open_job
from deepstack.training.observer import Observer


class StepSeconds(NamedTuple):
    """What one step took: all of it (batch, update, probe, row), and the probe for ‖ΔF‖ alone."""

    total: float
    probe: float


def timed_steps(config: conf.Config) -> Iterator[StepSeconds]:
    """Train step by step as `train` does, but for evaluations and snapshots; yield every time.

    It ends after `train.steps` steps.  A GPU's row is read back after each step, so that the time
    is that of the work and not of its launch.
    """
    quiet = {"train.eval_every": 0, "train.eval_batches": 1, "log.layers_every": 0}
    config = conf.with_overrides(config, quiet)
    with (
        tempfile.TemporaryDirectory(prefix="deepstack-") as folder,
        open_job(config, "trial", Path(folder), Observer(), False, "") as job,
    ):
        job.begin()
        for step in job.remaining_steps():
            began = time.perf_counter()
            inputs, targets = job.batch(step)
            measured = job.step(inputs, targets, job.learning_rate(step))
            before = time.perf_counter()
            update = job.update.measure()
            after = time.perf_counter()
            job.record(step, measured, update)
            job.recorder.flush()
            yield StepSeconds(time.perf_counter() - began, after - before)
