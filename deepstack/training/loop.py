"""The main loop: build, resume, then for each step a batch, a step, a row; finish."""

from __future__ import annotations

from pathlib import Path

from deepstack import config as conf
from deepstack.interrupts import Stop, stop_requests
from deepstack.records import Run
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
) -> Run:
    """Train what the configuration describes, in <out>/<study>/<run>, and return the run.

    A run that is done is not trained again; one that was interrupted goes on where it stopped,
    and its log equals that of an uninterrupted one.  Divergence is a result, not an error.

    config: what `deepstack.load_config` returns; it is never changed, and another one is made by
    `deepstack.config.with_overrides(config, {"model.depth": 48})`.
    study: name of the study's folder, by default the configuration's name or 'runs'.  observer:
    told of every event; `deepstack.training.PlainLines()` prints a line every five seconds.  stop:
    asked after every step; a signal number saves a checkpoint and ends the run.  Without it Ctrl-C
    does so after the step and raises KeyboardInterrupt, a second one at once, and what came after
    the last checkpoint is made again by the next call.
    Returns a Run: `run.steps`, `run.evals` (pandas), `run.state`, `run.path`.

    Raises, all of them in `deepstack.errors`, ConfigError, ResourceError (memory, disk, a folder in
    use), DifferenceError (a resumed run whose recomputed rows differ from its log), Interrupted.
    """
    with preflight(
        config,
        study,
        Path(out),
        observer or Observer(),
        allow_env_change=allow_env_change,
        command=command,
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
                    if run.diverged():
                        break
                    if run.snapshot_is_due(step):
                        run.snapshot(step)
                    if step in run.evaluation_steps:
                        run.evaluate(step)
                    if run.checkpoint_is_due(step):
                        run.save(step)
                    if signal := run.common_signal(stop_signal()):
                        run.interrupt(step, signal)
                return run.finish()
