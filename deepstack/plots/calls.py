"""The calls that draw charts: `plot` writes files or returns figures, `figure` returns one."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from deepstack.base.errors import ConfigError, NothingMatchedError
from deepstack.plots.arguments import AnyRuns, are_names, function_of, runs_of, split_options
from deepstack.plots.chart import CHARTS, MOST_MAIN, main_charts
from deepstack.plots.files import FORMATS
from deepstack.plots.study_charts import draw
from deepstack.runs.runs import NO_CHOICE, Runs


def figure(runs: AnyRuns, name: str, /, **options: Any) -> Figure:
    """Return a chart as a matplotlib Figure, which a notebook shows.

    runs: a folder, a run or several runs, or a table of `load_runs`; runs and name may change
        places.
    name: of a registered chart, `metric` (with x, y, by), `map` (with x, y, value) or `scatter`
        (with x, y).
    options: fields of `Options`, such as at_step=10, schemes=["deepnorm"] or style="paper".

    Raises ConfigError for an unknown chart or option, NothingMatchedError for runs that do not have
    its values.
    """
    if are_names(runs) and not are_names(name):
        runs, name = name, runs
    chosen, words = split_options(options)
    return function_of(name, words)(runs_of(runs), options=chosen).figure


def plot(
    directory: AnyRuns,
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
        of `metric` and `map`, `step` and `written` of `draw`, and the fields of `Options`.
        `main=True` draws at most five main charts of a study in place of all charts.

    Raises what `plots.draw` raises.
    """
    if are_names(directory) and charts is not None and not are_names(charts):
        directory, charts = charts, directory
    names = [charts] if isinstance(charts, str) else list(charts or ())
    options = {key: value for key, value in options.items() if value is not None}
    main = options.pop("main", False) and not names
    selection: dict[str, Any] = {
        key: options.pop(key)
        for key in ("where", "sort", "last", "best", "step", "written")
        if key in options
    }
    if NO_CHOICE in selection.get("best", ()):
        options["rates"] = "all"
    every = main_charts() if main else CHARTS
    if are_folders(directory):
        formats = options.pop("formats", FORMATS)
        formats = formats.split(",") if isinstance(formats, str) else formats
        chosen, words = split_options(options)
        if words and not names:
            word = next(iter(words))
            raise ConfigError(f"plot: --{word} belongs to the charts metric, map and scatter")
        functions = {name: function_of(name, words) for name in names or every}
        most = MOST_MAIN if main else None
        return draw(directory, functions, out, say, formats, chosen, most=most, **selection)
    selection = {k: v for k, v in selection.items() if k not in ("step", "written")}
    runs = runs_of(directory).select(**selection)
    options |= {"ordered": True} if selection.get("sort") else {}
    if charts is not None:
        figures = [figure(runs, name, **options) for name in names]
        return figures[0] if isinstance(charts, str) else figures
    allowed = figures_of(runs, every, say, options)
    return list(islice(allowed, MOST_MAIN if main else None))


def are_folders(value: Any) -> bool:
    """Return whether a value is one path or a list of paths."""
    paths = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(path, (str, os.PathLike)) for path in paths)


def figures_of(
    runs: Runs, names: Iterable[str], say: Callable[[str], None], options: Mapping[str, Any]
) -> Iterator[Figure]:
    """Yield the figure of each chart that these runs allow; say: gets a line for each other."""
    for name in names:
        try:
            yield figure(runs, name, **options)
        except NothingMatchedError as error:
            say(f"{name} is not drawn: {error}")
