"""Charts from Python: figures for notebooks, and `deepstack.plot` for files and figures."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstack.analysis.selection import select
from deepstack.errors import ConfigError, NothingMatchedError, ResourceError
from deepstack.plots.chart import CHARTS, ChartFunction, Options
from deepstack.plots.files import FORMATS, draw
from deepstack.plots.metric import metric, value_map
from deepstack.records import Run, find_runs
from deepstack.registry import unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Runs = Any  # a folder, a Run, several of these, or a table of load_runs
# Charts of words of the user: their functions, the words that each needs, and those it may have.
WORDED: dict[str, tuple[ChartFunction, Sequence[str], Sequence[str]]] = {
    "metric": (metric, ("x", "y"), ("by", "layers")),
    "map": (value_map, ("x", "y", "value"), ("layers",)),
}
WORDS = ("x", "y", "by", "value", "layers")
EXAMPLES = (
    "deepstack plot metric DIR --x depth --y val_loss --by scheme, or: "
    "deepstack plot map DIR --x depth --y lr --value val_loss"
)


def figure(runs: Runs, name: str, /, **options: Any) -> Figure:
    """Return a chart as a matplotlib Figure, which a notebook shows.

    runs: a folder, a run or several runs, or a table of `load_runs`; runs and name may change
    places.  name: of a registered chart, `metric` (with x, y, by) or `map` (with x, y, value).
    options: fields of `Options`, such as at_step=10, schemes=["deepnorm"] or style="paper".

    Raises ConfigError for an unknown chart or option, NothingMatchedError for runs that do not have
    its values.
    """
    if are_names(runs) and not are_names(name):
        runs, name = name, runs
    chosen, words = split_options(options)
    return function_of(name, words)(runs_of(runs), options=chosen).figure


def function_of(name: str, words: dict[str, Any]) -> ChartFunction:
    """Return the function of a chart, with the words of the user that `metric` and `map` need.

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


def runs_of(runs: Runs) -> list[Run]:
    """Return the runs of a folder, of a run or several, or of a table of `load_runs`.

    Raises NothingMatchedError without runs, ResourceError for a table without folders.
    """
    if isinstance(runs, Run):
        return [runs]
    if isinstance(runs, (str, os.PathLike)):
        return find_runs(runs)
    if hasattr(runs, "columns"):  # a table has one run in each row
        if "folder" not in runs.attrs:
            raise ResourceError("this table does not come from load_runs; give the folder instead")
        rows = set(zip(runs["study"], runs["run"], strict=True))
        every = find_runs(runs.attrs["folder"])
        return [run for run in every if (run.path.parent.name, run.path.name) in rows]
    every = [run for one in runs for run in runs_of(one)]
    if not every:
        raise NothingMatchedError("no runs are given")
    return every


def plot(
    directory: Runs,
    charts: Any = None,
    out: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> list[Path] | Figure | list[Figure]:
    """Draw charts of runs; the first two arguments may change places.

    plot("results/") writes every chart into figures/ of each study, or `out`, and returns the
    files; plot("results/", "update_vs_depth") and plot("update_vs_depth", "results/") write one.
    With runs (a `Run`, a list of them, a table of `load_runs`) instead of a folder it returns
    figures, which a notebook shows: one for one name, a list for several, and for none a list of
    all charts that these runs allow.

    options: `where`, `sort`, `last` and `best` of `load_runs`, `formats` of files, x, y, by, value
    of `metric` and `map`, and the fields of `Options`.
    Raises what `plots.draw` raises.
    """
    if are_names(directory) and charts is not None and not are_names(charts):
        directory, charts = charts, directory
    names = [charts] if isinstance(charts, str) else list(charts or ())
    options = {key: value for key, value in options.items() if value is not None}
    selection: dict[str, Any] = {
        key: options.pop(key) for key in ("where", "sort", "last", "best") if key in options
    }
    folders = [directory] if isinstance(directory, (str, os.PathLike)) else directory
    if isinstance(folders, (list, tuple)) and all(
        isinstance(f, (str, os.PathLike)) for f in folders
    ):
        formats = options.pop("formats", FORMATS)
        formats = formats.split(",") if isinstance(formats, str) else formats
        chosen, words = split_options(options)
        if words and not names:
            raise ConfigError(f"plot: --{next(iter(words))} belongs to the charts metric and map")
        functions = {name: function_of(name, words) for name in names or CHARTS}
        return draw(directory, functions, out, say, formats, chosen, **selection)
    runs = select(runs_of(directory), **selection)
    options |= {"ordered": True} if selection.get("sort") else {}
    if charts is not None:
        figures = [figure(runs, name, **options) for name in names]
        return figures[0] if isinstance(charts, str) else figures
    figures = []
    for name in CHARTS:
        try:
            figures.append(figure(runs, name, **options))
        except NothingMatchedError as error:
            say(f"{name} is not drawn: {error}")
    return figures
