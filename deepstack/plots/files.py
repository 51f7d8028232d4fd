"""Charts of the runs in folders: written as files, and as figures for notebooks."""

import dataclasses
import io
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from deepstack.base.csv_text import csv_text
from deepstack.base.errors import (
    BrokenChartError,
    ConfigError,
    DeepstackError,
    NothingMatchedError,
    PluginError,
    ResourceError,
)
from deepstack.base.plugins import bug_in
from deepstack.base.registry import unknown
from deepstack.base.text import printable
from deepstack.plots.chart import CHARTS, Chart, ChartFunction, Options
from deepstack.plots.file_names import file_name
from deepstack.plots.metric import metric, value_map
from deepstack.plots.reference import read_reference
from deepstack.plots.style import deepstack_style
from deepstack.records import Run, RunFolder
from deepstack.records.files import replace
from deepstack.records.opened import followed
from deepstack.records.published import writable
from deepstack.records.run import path_text
from deepstack.runs.conditions import Where
from deepstack.runs.runs import NO_CHOICE, Runs, choose_best
from deepstack.runs.settings import require
from deepstack.runs.studies import (
    Folders,
    find_studies,
    list_folders,
    refuse_unknown_diagnostic,
    use_readable,
)

FORMATS = ("pdf", "png", "svg", "csv")
DEFAULT_OPTIONS = Options()
# Forms of a figure -> what matplotlib would write into it that another day or version changes.
CHANGING_METADATA = {
    "pdf": ("CreationDate", "Creator", "Producer"),
    "png": ("Software",),
    "svg": ("Date", "Creator"),
}
AnyRuns = Any  # a folder, a Run, several of these, or a table of load_runs
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


def draw(
    directory: Folders,
    charts: Sequence[str] | Mapping[str, ChartFunction] | None = None,
    out: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda _: None,
    formats: Sequence[str] = FORMATS,
    options: Options = DEFAULT_OPTIONS,
    *,
    where: Where = (),
    sort: str | None = None,
    last: int | None = None,
    best: str | Sequence[str] = (),
    step: Callable[[str, int], None] = lambda name, total: None,
) -> list[Path]:
    """Draw charts (default: all) of the runs below a folder, into figures/ in each study or `out`.

    Charts compare the runs of one study; several studies go to `out`/<study>.  One run alone has
    its figures/ in its own folder.  Several folders make charts over the runs of all of them, in
    `out`; of runs with one configuration, seed included, the first alone is drawn.

    charts: names of registered charts, or functions by name.
    formats: of pdf, png, svg and csv.
    options: of all charts.

    where, last, best: as in `deepstack.load_runs`.
    sort: the order of runs, and so of the lines of a chart and its legend: a line has the place of
        its first run.

    step: is called before each chart with its name and the number of all charts.

    `say` gets a sentence for each run that cannot be read and is left out, and for each chart that
    these runs do not allow.
    Returns the files.
    Raises NothingMatchedError when there are no runs or nothing could be drawn, ResourceError when
    none of the runs can be read, ConfigError for an unknown chart, a reference.csv that cannot be
    used, or several folders without `out`; at the end BrokenChartError where the code of a chart
    has failed.
    """
    if not isinstance(charts, Mapping):
        charts = {name: CHARTS[name] for name in charts or CHARTS}
    for kind in formats:
        if kind not in FORMATS:
            raise ConfigError(unknown("--format", kind, FORMATS))
    folders = list_folders(directory)
    if len(folders) > 1 and out is None:
        raise ConfigError(
            f"charts over the runs of {len(folders)} folders need a folder of their own: --to "
            "FOLDER (out=… from Python)"
        )
    studies, skipped = find_studies(folders, where=where, sort=sort, last=last)
    studies = choose_best(studies, best)
    if options.diagnostic != DEFAULT_OPTIONS.diagnostic:
        every = [run for runs in studies.values() for run in runs]
        refuse_unknown_diagnostic(options.diagnostic, every)
    new_paths: list[Path] = []
    broken: list[str] = []
    notices: dict[str, None] = {}
    any_readable = False
    for study, members in studies.items():
        base = Path(folders[0]) if RunFolder(folders[0]).exists() else study
        several = len(studies) > 1
        subfolder = study.name if several else ""
        target = writable(base / "figures") if out is None else followed(Path(out)) / subfolder
        reference = options.reference
        if reference is None:
            reference = read_reference(folders, members)
        ordered = options.ordered or sort is not None
        shown = dataclasses.replace(options, reference=reference, ordered=ordered)
        draw_them = partial(
            draw_study,
            charts=charts,
            target=target,
            options=shown,
            formats=formats,
            notices=notices,
            step=lambda name: step(name, len(charts) * len(studies)),
        )
        paths, errors = use_readable(members, skipped, draw_them)
        new_paths += paths
        any_readable |= bool(paths or errors)
        for error in errors:
            reasons = broken if isinstance(error, BrokenChartError) else skipped
            reasons.append(f"{study.name}: {error}" if several else str(error))
    if broken:
        raise BrokenChartError("\n".join([*skipped, *broken]), new_paths)
    if not new_paths:  # the error says it all
        raise (NothingMatchedError if any_readable else ResourceError)("\n".join(skipped))
    for line in [*skipped, *list(notices)[:1]]:
        say(line)
    return new_paths


def draw_study(
    runs: Runs,
    charts: Mapping[str, ChartFunction],
    target: Path,
    options: Options,
    formats: Sequence[str],
    notices: dict[str, None],
    step: Callable[[str], None],
) -> tuple[list[Path], list[DeepstackError]]:
    """Draw charts of the runs of one study; return the files, and an error a chart not drawn.

    notices: gets the notice of each chart that has one.
    step: is called with the name of each chart.
    """
    paths: list[Path] = []
    errors: list[DeepstackError] = []
    for name, function in charts.items() if runs else ():
        step(name)
        result = try_chart(name, function, runs, options)
        if isinstance(result, DeepstackError):
            errors.append(result)
            continue
        notices |= dict.fromkeys(filter(None, [result.notice]))
        try:
            paths += save(result, target, file_name(name, function, options), formats, options)
        except ResourceError as error:
            raise ResourceError(f"{error}; give another folder with --to") from error
    return paths, errors


def try_chart(
    name: str, function: ChartFunction, runs: Runs, options: Options
) -> Chart | DeepstackError:
    """Return the chart of these runs, or the error that prevents it.

    NothingMatchedError: these runs do not have its values.  BrokenChartError: its code has failed;
    the reason has the line of a plugin, or else the innermost line.
    """
    try:
        return function(runs, options=options)
    except NothingMatchedError as error:
        return NothingMatchedError(f"{name} is not drawn: {error}")
    except PluginError as error:
        reason = str(error)
    except DeepstackError:
        raise
    except Exception as error:
        innermost = traceback.extract_tb(error.__traceback__)[-1]
        reason = bug_in(error) or f"{innermost.filename}:{innermost.lineno}: {error!r}"
    return BrokenChartError(f"{name} is not drawn: its code has failed: {reason}", [])


def save(
    chart: Chart,
    folder: Path,
    name: str,
    formats: Sequence[str] = FORMATS,
    options: Options = DEFAULT_OPTIONS,
) -> list[Path]:
    """Write <name>.pdf, .png, .svg and .csv; the same chart gives the same bytes.

    formats: which of these.  A chart in the style `paper` has its caption in <name>.txt.
    """
    paths = []
    for kind in formats:
        paths.append(folder / f"{name}.{kind}")
        replace(paths[-1], csv_bytes(chart) if kind == "csv" else render(chart, kind, options))
    if options.style == "paper" and chart.caption:
        paths.append(folder / f"{name}.txt")
        replace(paths[-1], printable(chart.caption).encode("utf-8"))
    return paths


def render(chart: Chart, kind: str, options: Options = DEFAULT_OPTIONS) -> bytes:
    """Return the figure as a pdf, png or svg; in the style `paper` texts of an SVG are text."""
    buffer = io.BytesIO()
    with deepstack_style(options.font, svg_text=options.style == "paper"):
        chart.figure.savefig(buffer, format=kind, metadata=dict.fromkeys(CHANGING_METADATA[kind]))
    return buffer.getvalue()


def csv_bytes(chart: Chart) -> bytes:
    """Return the values of a chart as CSV."""
    return csv_text(chart.data).encode("utf-8", "backslashreplace")


def figure(runs: AnyRuns, name: str, /, **options: Any) -> Figure:
    """Return a chart as a matplotlib Figure, which a notebook shows.

    runs: a folder, a run or several runs, or a table of `load_runs`; runs and name may change
        places.
    name: of a registered chart, `metric` (with x, y, by) or `map` (with x, y, value).
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
        of `metric` and `map`, `step` of `draw`, and the fields of `Options`.

    Raises what `plots.draw` raises.
    """
    if are_names(directory) and charts is not None and not are_names(charts):
        directory, charts = charts, directory
    names = [charts] if isinstance(charts, str) else list(charts or ())
    options = {key: value for key, value in options.items() if value is not None}
    selection: dict[str, Any] = {
        key: options.pop(key) for key in ("where", "sort", "last", "best", "step") if key in options
    }
    if NO_CHOICE in selection.get("best", ()):
        options["rates"] = "all"
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
    selection.pop("step", None)
    runs = runs_of(directory).select(**selection)
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
