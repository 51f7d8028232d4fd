"""The arguments of a call that draws: runs, names of charts, options, and words of the user."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from deepstack.base.errors import ConfigError, ResourceError
from deepstack.base.registry import unknown
from deepstack.plots.chart import CHARTS, ChartFunction, Options
from deepstack.plots.metric import metric, value_map
from deepstack.plots.scatter import scatter
from deepstack.records import Run
from deepstack.records.run import path_text
from deepstack.runs.runs import Runs
from deepstack.runs.settings import require

AnyRuns = Any  # a folder, a Run, several of these, or a table of load_runs
# Charts of words of the user: their functions, the words that each needs, and those it may have.
WORDED: dict[str, tuple[ChartFunction, Sequence[str], Sequence[str]]] = {
    "metric": (metric, ("x", "y"), ("by", "layers")),
    "map": (value_map, ("x", "y", "value"), ("layers",)),
    "scatter": (scatter, ("x", "y"), ()),
}
WORDS = ("x", "y", "by", "value", "layers")
EXAMPLES = (
    "deepstack plot metric DIR --x depth --y val_loss --by scheme, or: "
    "deepstack plot map DIR --x depth --y lr --value val_loss, or: "
    "deepstack plot scatter DIR --x update_first --y val_loss"
)


def function_of(name: str, words: dict[str, Any]) -> ChartFunction:
    """Return the function of a chart, with the words of the user that `WORDED` says it needs.

    Raises ConfigError for missing and extra words.
    """
    for word in words:
        if word not in WORDS:
            raise ConfigError(unknown("option", word, [*Options.__dataclass_fields__, *WORDS]))
    function, needed, more = WORDED[name] if name in WORDED else (CHARTS[name], (), ())
    problems = [f"needs --{word}" for word in needed if word not in words]
    problems += [f"has no --{word}" for word in words if word not in (*needed, *more)]
    if problems:
        raise ConfigError(f"plot {name}: {' and '.join(problems)}; as in: {EXAMPLES}")
    return partial(function, **words)


def split_options(options: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Return the fields of `Options`, and the other words."""
    fields = Options.__dataclass_fields__
    known = {key: value for key, value in options.items() if key in fields}
    if (schemes := known.get("schemes")) is not None:
        known["schemes"] = tuple(schemes.split(",") if isinstance(schemes, str) else schemes)
    return Options(**known), {key: v for key, v in options.items() if key not in fields}


def are_names(words: object) -> bool:
    """Return whether an argument is the name of a chart, or a list of names, and not a folder."""
    listed = [words] if isinstance(words, str) else words
    return (
        isinstance(listed, (list, tuple))
        and bool(listed)
        and all(isinstance(w, str) and (w in CHARTS or w in WORDED) for w in listed)
        and not any(Path(str(word)).is_dir() for word in listed)
    )


def runs_of(runs: AnyRuns) -> Runs:
    """Return the runs of a folder, of a run or several, or of a table of `load_runs`.

    Raises NothingMatchedError without runs, ResourceError for a table without folders.
    """
    if isinstance(runs, Run):
        return Runs([runs])
    if isinstance(runs, Runs):
        return runs
    if isinstance(runs, (str, os.PathLike)):
        return Runs.below(runs)
    if hasattr(runs, "columns"):  # a table has one run in each row
        if "folder" not in runs.attrs:
            raise ResourceError("this table does not come from load_runs; give the folder instead")
        return runs_of_table(runs)
    return Runs(require([run for one in runs for run in runs_of(one)], "no runs are given"))


def runs_of_table(table: pd.DataFrame) -> Runs:
    """Return the runs in the rows of a table of `load_runs`, by their paths.

    Raises ConfigError for a table without the column `path` whose names mean several runs.
    """
    every = Runs.below(table.attrs["folder"])
    if "path" in table:
        paths = set(table["path"])
        return every.keep(lambda run: path_text(run) in paths)
    rows = set(zip(table["study"], table["run"], strict=True))
    chosen = every.keep(lambda run: (run.study, run.name) in rows)
    if len(chosen) > len(rows):
        raise ConfigError("study and run of this table mean several runs; keep its column path")
    return chosen
