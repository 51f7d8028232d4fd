"""A sweep from the library: plan, run, read back."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack.base import plugins
from deepstack.base.ending import Stop, stop_requests
from deepstack.base.errors import ConfigError
from deepstack.base.kinds import kinds_of
from deepstack.base.notebook import in_notebook
from deepstack.base.progress import NotebookView
from deepstack.base.registry import Registry
from deepstack.config.instruments import switches
from deepstack.records import Run
from deepstack.schemes import SCHEMES
from deepstack.sweeps.local import Local, default_workers, memory_budget, refuse_missing
from deepstack.sweeps.plan import Cell, plan, retry_states
from deepstack.sweeps.pool import CellProgress, Pool
from deepstack.tasks import TASKS

# Settings of a run that measures a stack as it starts, and neither evaluates nor schedules.
MEASURE_ONLY: dict[str, Any] = {
    "train.schedule": "constant",
    "train.schedule_options": {},
    "train.final_lr_factor": 0.0,
    "train.decay_period": None,
    "train.warmup_steps": 0,
    "train.eval_every": 0,
    "train.eval_batches": 1,
    "log.skipped_layers": 0,
    **switches("attribution_every"),
}


def sweep(
    config: conf.Config | conf.Study,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    study: str | None = None,
    out: str | Path = "results",
    workers: int | None = None,
    retry: str | None = None,
    max_hours: float | None = None,
    run_timeout: float | None = None,
    memory: str | None = None,
    stop: Stop | None = None,
    show: Callable[[Sequence[CellProgress]], None] | None = None,
) -> list[Run]:
    """Train every cell of the grid, {dotted key: values}, and return the runs.

    config: a configuration, or a study (`deepstack.config.load_study`) without a grid.
    retry: failed runs to run again: 'failed', 'out_of_memory' or 'all'.  Finished runs are skipped
        and interrupted ones resume.
    workers: processes at a time, one a run (default: as many as there are cores for).
    memory: for all runs together, '8GB' or a share such as '0.5' (default: most of the free one).
    max_hours: after this time nothing new starts, and running processes save and end.
    run_timeout: seconds of one start of a run, which is then ended and counts as failed.
    stop: called while the sweep runs; if it returns a signal number, all runs save and the sweep
        ends.  Without it Ctrl-C does so and raises KeyboardInterrupt; a second one raises at once.
    show: called repeatedly with the progress (`p.cell.folder.name`, `p.state`, `p.step`) of all
        cells, for a progress bar.  Without it, a notebook shows one bar for all runs.

    Returns a Run for each cell that has a folder, in any state.  Raises ConfigError before anything
    runs if a cell is not valid, or names a scheme, task or norm that only this process has
    registered (`deepstack.load_plugins` registers it for the runs too).  Raises it at the
    end if a run's process refused to begin.
    """
    plugins.refuse_while_loading("deepstack.sweep")
    base = config.base if isinstance(config, conf.Study) else conf.checked_config(config)
    name = base.name or "sweep" if study is None else conf.checked_study(study)
    retried = retry_states(retry)
    budget = memory_budget(memory)
    cells = plan(config, grid, study=name, out=Path(out))
    refuse_local(cells)
    refuse_missing(cells, retried)
    launcher = Local(cells, name, Path(out), workers or default_workers(cells), budget=budget)
    seconds = None if max_hours is None else 3600 * max_hours
    show = show or (notebook_bar() if in_notebook() else lambda progress: None)
    with stop_requests(stop) as stop_signal:
        progress = Pool(cells, launcher, retried, stop_signal, show, seconds, run_timeout).run()
    refused = [p for p in progress if p.state == "failed" and not p.cell.folder.exists()]
    if refused:
        raise ConfigError(
            f"{len(refused)} of {len(cells)} runs could not begin: {refused[0].message}"
        )
    return [Run(cell.folder.path) for cell in cells if cell.folder.exists()]


def notebook_bar() -> Callable[[Sequence[CellProgress]], None]:
    """Return a function that draws a bar of the runs that have ended, with the number by state."""
    view = NotebookView()

    def show(progress: Sequence[CellProgress]) -> None:
        states = Counter(entry.state for entry in progress)
        waiting = states["running"] + states["waiting"] + states["new"]
        text = ", ".join(f"{count} {state}" for state, count in states.items())
        total = len(progress)
        view.show(total - waiting, total, f"runs ended: {text}")

    return show


def refuse_local(cells: Sequence[Cell]) -> None:
    """Raise ConfigError for a definition that the processes of the runs do not know."""
    for cell in cells:
        named: list[tuple[Registry[Any], str]] = [
            (SCHEMES, cell.config.model.scheme),
            (TASKS, cell.config.task.name),
            *((kind, name) for kind, name, _ in kinds_of(cell.config)),
        ]
        for registry, name in named:
            if not plugins.known_elsewhere(registry[name]):
                raise ConfigError(
                    f"the {registry.kind} {name!r} is known to this process alone, and each run "
                    "of a sweep is another: put it into a file, and call "
                    "deepstack.load_plugins(['my_file.py'])"
                )
