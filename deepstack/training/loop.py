"""The main loop: preflight, then a run with a batch, an update and a row for each step."""

from __future__ import annotations

from pathlib import Path

from deepstack import config as conf
from deepstack.interrupts import Stop, stop_requests
from deepstack.model import with_steps
from deepstack.records import Run
from deepstack.training.extension import Parent
from deepstack.training.notebook_progress import default_observer
from deepstack.training.observer import Observer
from deepstack.training.preflight import preflight
from deepstack.training.run import open_run


def train(
    config: conf.Config,
    *,
    study: str | None = None,
    out: str | Path = "results",
    observer: Observer | None = None,
    stop: Stop | None = None,
    allow_env_change: bool = False,
    command: str = "",
    parent: Parent | None = None,
) -> Run:
    """Train the configured run in <out>/<study>/<run> and return it.

    A finished run is not trained again.  An interrupted run resumes, and its log equals that of an
    uninterrupted one.  Divergence is a result, not an error.

    config: from `deepstack.load_config`; it is never changed.
    `deepstack.config.with_overrides(config, {"model.depth": 48})` returns a changed one.
    study: name of the study's folder, by default the configuration's name or 'runs'.
    observer: receives every event; `deepstack.training.PlainLines()` prints a line every five
    seconds.  Without one, a notebook shows a progress bar; `deepstack.training.Observer()` is
    silent.
    stop: called after every step; if it returns a signal number, the run saves a checkpoint and
    ends.  Without `stop`, Ctrl-C does so after the step and raises KeyboardInterrupt.  A second
    Ctrl-C raises at once, and the next call repeats the steps after the last checkpoint.

    parent: a finished run that this one extends; `deepstack.training.parent_of(run, steps)` returns
    it, and `parent.config` is the config to train.

    Returns a Run: `run.steps`, `run.evals` (pandas), `run.state`, `run.path`.

    Raises errors of `deepstack.errors`: ConfigError, ResourceError (memory, disk, a folder in use),
    DifferenceError (a resumed run whose recomputed rows differ from its log) and Interrupted.
    """
    with preflight(
        with_steps(conf.checked_config(config)),
        study,
        Path(out),
        observer or default_observer(),
        allow_env_change=allow_env_change,
        command=command,
        parent=parent,
    ) as prepared:
        if isinstance(prepared, Run):
            return prepared
        with open_run(prepared) as run:
            run.begin()
            with stop_requests(stop) as stop_signal:
                for step in run.remaining_steps():
                    inputs, targets = run.batch(step)
                    measured = run.step(inputs, targets, run.learning_rate(step))
                    run.record(step, measured)
                    if run.recorder.divergence:
                        break
                    if run.snapshots.is_due(step):
                        run.snapshot(step)
                    if run.evaluation_is_due(step):
                        run.evaluate(step)
                    if run.checkpoint_is_due(step):
                        run.save(step)
                    if signal := run.ranks.max_over_ranks(stop_signal() or 0):
                        run.interrupt(step, signal)
                return run.finish()
