"""A sweep from the library: plan, run, read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack import plugins
from deepstack.errors import ConfigError
from deepstack.interrupts import Stop, stop_requests
from deepstack.records import Run
from deepstack.schemes import NORMS, SCHEMES
from deepstack.sweeps.local import Local, default_workers
from deepstack.sweeps.plan import Cell, plan, retry_states
from deepstack.sweeps.pool import Pool, Progress
from deepstack.sweeps.resources import memory_budget
from deepstack.tasks import TASKS


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
    show: Callable[[Sequence[Progress]], None] = lambda progress: None,
) -> list[Run]:
    """Train every combination of the grid's values, {dotted key: values}, and return the runs.

    A study (`deepstack.config.load_study`) may stand in place of a configuration and a grid.  What
    is done already is not trained again, what was interrupted goes on; failed runs are left as
    they are unless retry names them: 'failed', 'out_of_memory' or 'all'.  Each run is a process of
    its own, `workers` at a time (default: as many as there are cores for), as long as they fit
    into `memory` ('8GB', a share such as '0.5'; default: most of what is free).  After max_hours
    nothing new starts and what runs saves and ends; a run that takes longer than run_timeout, in
    seconds a start, is ended and counts as failed.  stop: asked while it runs; a signal number has
    every run save and ends the sweep; without it Ctrl-C does so and raises KeyboardInterrupt, a
    second one at once.  show: given how far every run is, again and again, for a
    progress bar (`p.cell.folder.name`, `p.state`, `p.step` of each).  Returns a Run for each cell
    that has a folder, whatever its state.

    Raises ConfigError before anything runs when
    a cell is not valid, or names a scheme or a task that this process alone has registered
    (those of one's own reach a run by `deepstack.plugins.load_plugins`), and at the end where a
    run's process has refused to begin.
    """
    plugins.refuse_while_loading("deepstack.sweep")
    base = config.base if isinstance(config, conf.Study) else conf.checked_config(config)
    name = base.name or "sweep" if study is None else conf.checked_study(study)
    again = retry_states(retry)
    budget = memory_budget(memory)
    cells = plan(config, grid, study=name, out=Path(out))
    refuse_local(cells)
    launcher = Local(cells, name, Path(out), workers or default_workers(cells), budget=budget)
    seconds = None if max_hours is None else 3600 * max_hours
    with stop_requests(stop) as asked:
        progress = Pool(cells, launcher, again, asked, show, seconds, run_timeout).run()
    refused = [p for p in progress if p.state == "failed" and not p.cell.folder.exists()]
    if refused:
        raise ConfigError(
            f"{len(refused)} of {len(cells)} runs could not begin: "
            f"{refused[0].message.removeprefix('deepstack: ')}"
        )
    return [Run(cell.folder.path) for cell in cells if cell.folder.exists()]


def refuse_local(cells: Sequence[Cell]) -> None:
    """Raise ConfigError for a scheme, task or norm that the runs' own processes would not know."""
    for cell in cells:
        model, task = cell.config.model, cell.config.task.name
        for kind, name, owner in (
            ("scheme", model.scheme, SCHEMES[model.scheme]),
            ("task", task, TASKS[task]),
            ("norm", model.norm.kind, NORMS[model.norm.kind]),
        ):
            if not plugins.known_elsewhere(owner):
                raise ConfigError(
                    f"the {kind} {name!r} is known to this process alone, and each run of a sweep "
                    "is another: put it into a file, and call "
                    "deepstack.plugins.load_plugins([Path('my_file.py')])"
                )
