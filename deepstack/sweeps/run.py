"""A sweep from the library: plan, run, read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack.errors import ConfigError
from deepstack.records import Run
from deepstack.sweeps.local import Local, default_workers
from deepstack.sweeps.plan import plan, retry_states
from deepstack.sweeps.pool import Pool, Progress
from deepstack.sweeps.room import memory_budget


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
    stop: Callable[[], int | None] = lambda: None,
    show: Callable[[Sequence[Progress]], None] = lambda progress: None,
) -> list[Run]:
    """Train every combination of the grid's values, {dotted key: values}, and return the runs.

    A study (`deepstack.config.load_study`) may stand in place of a configuration and a grid.  What
    is done already is not trained again, what was interrupted goes on; failed runs are left as
    they are unless retry names them: 'failed', 'out_of_memory' or 'all'.  Each run is a process of
    its own, `workers` at a time (default: as many as there are cores for), as long as they fit
    into `memory` ('8GB', a share such as '0.5'; default: most of what is free).  After max_hours
    nothing new starts and what runs saves and ends; a run that takes longer than run_timeout, in
    seconds a start, is ended and counts as failed.  Raises ConfigError before anything runs when
    a cell is not valid, and at the end where a run's process has refused to begin: schemes and
    tasks of one's own reach it by `deepstack.plugins.load_plugins`.
    """
    base = config if isinstance(config, conf.Config) else config.base
    name = base.name or "sweep" if study is None else conf.checked_study(study)
    again = retry_states(retry)
    budget = memory_budget(memory)
    cells = plan(config, grid, study=name, out=Path(out))
    launcher = Local(cells, name, Path(out), workers or default_workers(cells), budget=budget)
    seconds = None if max_hours is None else 3600 * max_hours
    progress = Pool(cells, launcher, again, stop, show, seconds, run_timeout).run()
    refused = [p for p in progress if p.state == "failed" and not p.cell.folder.exists()]
    if refused:
        raise ConfigError(
            f"{len(refused)} of {len(cells)} runs could not begin: "
            f"{refused[0].message.removeprefix('deepstack: ')}\n"
            "a scheme or a task that this process alone has registered is unknown in theirs: put "
            "it into a file, and call deepstack.plugins.load_plugins([Path('my_file.py')])"
        )
    return [Run(cell.folder.path) for cell in cells if cell.folder.exists()]
