"""Makes a table with a row for each run of a study; a script of an experiment imports it."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from deepstack.records import Run, find_runs
from deepstack.runs import final_value, has_diverged, mean_of

SETTINGS = {
    "scheme": "model.scheme",
    "depth": "model.depth",
    "width": "model.d_model",
    "unique": "model.unique_layers",
    "norm": "model.norm.kind",
    "held_out": "task.held_out",
    "grow": "model.grow",
    "lr": "train.lr",
    "seed": "seed",
}


def load_runs(
    here: Path, columns: Iterable[str], endings: tuple[str, str] = ("", "_reported")
) -> pd.DataFrame:
    """Return the table of runs.csv in the folder of an experiment.

    If the command line names a folder of results, runs.csv is first made from its runs.

    endings: of the names of the two folders of runs, which chose the rates and are reported.
    """
    file = here / "runs.csv"
    if len(sys.argv) > 1:
        names = dict(zip(("rates", "reported"), endings, strict=True))
        folders = {kind: Path(sys.argv[1]) / f"{here.name}{end}" for kind, end in names.items()}
        table_of(folders, columns).to_csv(file, index=False)
    return pd.read_csv(file)


def table_of(folders: Mapping[str, Path], columns: Iterable[str]) -> pd.DataFrame:
    """Return kind, settings, final and least validation loss of the ended runs in folders.

    folders: by kind, as in {"rates": ..., "reported": ...}; of each one the runs are sorted.
    columns: names of settings; the loss of a run that diverged is infinite.
    """
    columns = [*columns, "lr", "seed"]
    parts = []
    for kind, folder in folders.items():
        runs = [run for run in find_runs(folder) if run.state in ("done", "diverged")]
        rows = [{"kind": kind} | row_of(run, columns) for run in runs]
        parts.append(pd.DataFrame(rows).sort_values(columns))
    return pd.concat(parts)


def row_of(run: Run, columns: Iterable[str]) -> dict[str, Any]:
    """Return settings, final validation loss and, of several evaluations, the least one."""
    row = {column: run.get(SETTINGS[column]) for column in columns}
    row["val_loss"] = float("inf") if has_diverged(run) else round(final_value(run, "loss"), 6)
    if len(run.evals) > 2:  # also between the first step and the last
        row["least_loss"] = round(run.evals["loss"].min(), 6)
    return row


def text_of(values: Iterable[float], digits: int = 3) -> str:
    """Return the mean of one value a seed with its 95 % interval (Student's t)."""
    mean = mean_of(list(values))
    value, low, high = (f"{one:+.{digits}f}" for one in (mean.value, mean.low, mean.high))
    return f"{value} ({low} to {high})"
