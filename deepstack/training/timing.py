"""Runs in a temporary folder, to time their steps."""

import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from deepstack import config as conf
from deepstack.config.instruments import without_snapshots
from deepstack.training.claim import claim, prepare
from deepstack.training.environment import usual_torch_modes
from deepstack.training.observer import Observer
from deepstack.training.preflight import plan_run
from deepstack.training.run import TrainingRun, open_run


def timed_steps(config: conf.Config, *, logged: bool = True) -> Generator[float]:
    """Train as `train` does, without evaluations and snapshots, and yield the seconds of each step.

    logged=False leaves out the probe for ‖ΔF‖ and the row: the difference is their cost.  Each step
    waits for a GPU's results, so that the time includes the work and not just its launch.
    """
    quiet = {"train.eval_every": 0, "train.eval_batches": 1}
    config = conf.with_overrides(config, quiet | without_snapshots())
    with temporary_run(config, measures=logged) as run:
        run.begin()
        for step in run.remaining_steps():
            began = time.perf_counter()
            inputs, targets = run.batch(step)
            measured = run.step(inputs, targets, run.learning_rate(step))
            if logged:
                run.record(step, measured)
            float(measured.loss)
            yield time.perf_counter() - began


@contextmanager
def temporary_run(
    config: conf.Config, *, measures: bool = True, folder: Path | None = None
) -> Iterator[TrainingRun]:
    """Yield a run in a temporary folder (below `folder`), for measurements of its parts."""
    with (
        tempfile.TemporaryDirectory(prefix="deepstack-", dir=folder) as out,
        usual_torch_modes(),
        claim(plan_run(config, "trial", out)) as claimed,
        prepare(claimed, Observer(), saves=False) as prepared,
        open_run(prepared, measures=measures) as run,
    ):
        yield run
