"""Runs `deepstack train` in a watched process, forked from one that has imported everything.

The fork server of multiprocessing imports this module with STORAGE_LIBRARY in its environment.  It
then loads the watcher of system calls and trains once, so that every later process starts at once.
"""

import gc
import io
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import QUICK, storage_calls
from helpers.extensions import known
from helpers.storage_calls import WATCH, mark

STEPS, INTERVAL = 6, 2
SETTINGS = {
    "model.depth": 2, "model.d_model": 8, "task.seq_len": 8, "train.batch_size": 2,
    "train.steps": STEPS, "train.eval_every": 3, "train.eval_batches": 1, "log.probe_sequences": 1,
    "log.layers_every": 3, **known({"log.attribution_every": 3}), "runtime.device": "cpu",
}  # fmt: skip
STUDY = "small"
# Every diagnostic is written by the same call: three files of them are enough, and soon written.
KEPT_DIAGNOSTICS = ("param_norm", "grad_norm", "stream_norm")


@dataclass(frozen=True)
class Job:
    """One process.

    errors, trace: files for its stderr and its calls.  mode, number, error: as of
    `storage_calls.watch`; with None as mode nobody watches.  settings: `key=value` of the run.
    planted: names of storage_faults.  signals: (step, number) that it sends to itself after a step.
    pause: seconds after each step.
    """

    out: Path
    errors: Path
    trace: Path
    mode: int | None = WATCH
    number: int = 0
    error: int = 0
    settings: tuple[str, ...] = ()
    planted: tuple[str, ...] = ()
    signals: tuple[tuple[int, int], ...] = ()
    pause: float = 0.0


def work(job: Job) -> None:
    """Do a job in a process that was forked for it, and end with the exit code of the command."""
    from deepstack.training.run import TrainingRun
    from helpers.storage_faults import FAULTS

    code, record = 99, TrainingRun.record

    def recorded(self: TrainingRun, step: int, measured: Any) -> None:
        record(self, step, measured)
        time.sleep(job.pause)
        for at, number in job.signals:
            if at == step:
                os.kill(os.getpid(), number)

    try:
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(0, 1)
        os.dup2(os.open(job.errors, os.O_WRONLY | os.O_CREAT), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        setattr(TrainingRun, "record", recorded)  # noqa: B010, mypy refuses an assignment
        for name in job.planted:
            plant, _, _ = FAULTS[name]
            plant()
        if job.mode is not None:
            storage_calls.watch(job.out, job.mode, job.number, job.error, str(job.trace))
        command(job.out, *job.settings)
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def command(out: Path, *settings: str) -> None:
    """`deepstack train` of a small configuration, a checkpoint every other step."""
    from deepstack.cli import main

    sys.argv = ["deepstack", "train", QUICK, "--study", STUDY, "--quiet"]
    sys.argv += [*(f"{key}={value}" for key, value in SETTINGS.items()), *settings]
    sys.argv += ["--out", str(out)]
    main()


def prepare_training() -> None:
    """Fewer files, checkpoints by the step and not by the clock, and marks in the trace.

    A mark is the step of a checkpoint that is saved; minus the first step as a run begins.
    """
    from deepstack.diagnostics.layers import DIAGNOSTICS
    from deepstack.training import meta
    from deepstack.training.run import TrainingRun

    kept = {name: DIAGNOSTICS._objects[name] for name in KEPT_DIAGNOSTICS}
    DIAGNOSTICS._objects = kept
    # Git's own processes would not survive the watcher of system calls.
    vars(meta)["git_state"] = dict
    begin, save, finish = TrainingRun.begin, TrainingRun.save, TrainingRun.finish

    def due(self: TrainingRun, step: int) -> bool:
        return step % INTERVAL == 0 and step < self.prepared.plan.config.train.steps

    def begun(self: TrainingRun) -> None:
        mark(-self.progress.step - 1)
        begin(self)

    def saved(self: TrainingRun, step: int) -> None:
        save(self, step)
        mark(step)

    def finished(self: TrainingRun) -> Any:
        steps = self.prepared.plan.config.train.steps
        run = finish(self)
        mark(steps)
        return run

    changed: dict[str, Callable[..., Any]] = {
        "checkpoint_is_due": due, "begin": begun, "save": saved, "finish": finished
    }  # fmt: skip
    for name, method in changed.items():
        setattr(TrainingRun, name, method)


def prepare(library: str) -> None:
    """Train once, so that the processes forked later share all imports."""
    import torch

    from helpers import storage_faults  # noqa: F401

    torch.set_num_threads(1)
    storage_calls.load(Path(library))
    prepare_training()
    with tempfile.TemporaryDirectory() as folder, suppress(SystemExit):
        with redirect_stdout(io.StringIO()):
            command(Path(folder))
    gc.collect()
    gc.freeze()


if library := os.environ.get("STORAGE_LIBRARY"):
    prepare(library)
