"""A sweep from the library: plan, run, read back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack.records import Run
from deepstack.sweeps.local import Local, default_workers
from deepstack.sweeps.plan import plan
from deepstack.sweeps.pool import Pool, Progress


def sweep(
    config: conf.Config,
    grid: Mapping[str, Sequence[Any]],
    *,
    study: str | None = None,
    out: str | Path = "results",
    workers: int | None = None,
    retry: bool = False,
    stop: Callable[[], int | None] = lambda: None,
    show: Callable[[Sequence[Progress]], None] = lambda progress: None,
) -> list[Run]:
    """Train every combination of the grid's values, {dotted key: values}, and return the runs.

    What is done already is not trained again, what was interrupted goes on; failed runs are left
    as they are unless retry is True.  Each run is a process of its own, `workers` at a time
    (default: as many as there are cores or GPUs for).  Raises ConfigError before anything runs
    when a cell is not valid.
    """
    name = study or config.name or "sweep"
    cells = plan(config, grid, study=name, out=Path(out))
    launcher = Local(cells, name, Path(out), workers or default_workers(cells))
    Pool(cells, launcher, retry=retry, stop=stop, show=show).run()
    return [Run(cell.folder.path) for cell in cells if cell.folder.exists()]
