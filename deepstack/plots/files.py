"""Draws charts of the runs in a folder, each as PDF, PNG, SVG and a CSV of its values."""

from __future__ import annotations

import dataclasses
import io
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deepstack.analysis.comparison import choose_best
from deepstack.analysis.selection import Where
from deepstack.analysis.studies import (
    Folders,
    find_studies,
    list_folders,
    refuse_unknown_diagnostic,
    use_readable,
)
from deepstack.errors import (
    BrokenChartError,
    ConfigError,
    DeepstackError,
    NothingMatchedError,
    PluginError,
    ResourceError,
)
from deepstack.plots.chart import CHARTS, Chart, ChartFunction, Options
from deepstack.plugins import bug_in
from deepstack.records import Run, RunFolder
from deepstack.records.cells import printable
from deepstack.records.files import replace
from deepstack.records.published import writable
from deepstack.registry import unknown

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("pdf", "png", "svg", "csv")
DEFAULT_OPTIONS = Options()
REFERENCE_COLUMNS = ("chart", "x", "y", "label")
# Forms of a figure -> what matplotlib would write into it that another day or version changes.
CHANGING_METADATA = {
    "pdf": ("CreationDate", "Creator", "Producer"),
    "png": ("Software",),
    "svg": ("Date", "Creator"),
}


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
) -> list[Path]:
    """Draw charts (default: all) of the runs below a folder, into figures/ in each study or `out`.

    Charts compare the runs of one study; those of several go to `out`/<study>.  One run alone has
    its figures/ in its own folder.  Several folders make charts over the runs of all of them, in
    `out`; of runs with one configuration, seed included, the first alone is drawn.

    charts: names of registered charts, or functions by name.  formats: of pdf, png, svg and csv.
    options: of all charts.

    where, last, best: as in `deepstack.load_runs`.  sort: the order of runs, and so of the lines of
    a chart and its legend: a line has the place of its first run.
    `say` gets a sentence for each run that cannot be read and is left out, and for each chart that
    these runs do not allow. Returns the files.  Raises NothingMatchedError when there are no
    runs or nothing could be drawn, ResourceError when none of the runs can be read, ConfigError for
    an unknown chart, a reference.csv that cannot be used, or several folders without `out`; at the
    end BrokenChartError where the code of a chart has failed.
    """
    if not isinstance(charts, Mapping):
        charts = {name: CHARTS[name] for name in charts or CHARTS}
    for kind in formats:
        if kind not in FORMATS:
            raise ConfigError(unknown("format", kind, FORMATS))
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
    any_readable = False
    for study, members in studies.items():
        base = Path(folders[0]) if RunFolder(folders[0]).exists() else study
        several = len(studies) > 1
        subfolder = study.name if several else ""
        target = writable(base / "figures") if out is None else Path(out) / subfolder
        reference = read_reference(folders, members)
        ordered = options.ordered or sort is not None
        options = dataclasses.replace(options, reference=reference, ordered=ordered)
        draw_them = partial(
            draw_study, charts=charts, target=target, options=options, formats=formats
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
    for line in skipped:
        say(line)
    return new_paths


def draw_study(
    runs: list[Run],
    charts: Mapping[str, ChartFunction],
    target: Path,
    options: Options,
    formats: Sequence[str],
) -> tuple[list[Path], list[DeepstackError]]:
    """Draw charts of the runs of one study; return the files, and an error a chart not drawn."""
    paths: list[Path] = []
    errors: list[DeepstackError] = []
    for name, function in charts.items() if runs else ():
        result = try_chart(name, function, runs, options)
        if isinstance(result, DeepstackError):
            errors.append(result)
            continue
        try:
            paths += save(result, target, name, formats, options)
        except ResourceError as error:
            raise ResourceError(f"{error}; give another folder with --to") from error
    return paths, errors


def try_chart(
    name: str, function: ChartFunction, runs: Sequence[Run], options: Options
) -> Chart | DeepstackError:
    """Return the chart of these runs, or the error that prevents it.

    NothingMatchedError: these runs do not have its values.  BrokenChartError: its code has failed.
    """
    try:
        return function(list(runs), options=options)
    except NothingMatchedError as error:
        return NothingMatchedError(f"{name} is not drawn: {error}")
    except Exception as error:
        if isinstance(error, DeepstackError) and not isinstance(error, PluginError):
            raise
        return BrokenChartError(
            f"{name} is not drawn: its code has failed: {describe_error(error)}", []
        )


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
    from deepstack.plots.style import deepstack_style

    buffer = io.BytesIO()
    with deepstack_style(options.font, svg_text=options.style == "paper"):
        chart.figure.savefig(buffer, format=kind, metadata=dict.fromkeys(CHANGING_METADATA[kind]))
    return buffer.getvalue()


def csv_bytes(chart: Chart) -> bytes:
    """Return the values of a chart as CSV."""
    table = chart.data.to_csv(index=False, float_format="%.9g", lineterminator="\n")
    return table.encode("utf-8", "backslashreplace")


def describe_error(error: Exception) -> str:
    """Return an error with its place: the line of a plugin, or else the innermost line."""
    if isinstance(error, DeepstackError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return bug_in(error) or f"{last.filename}:{last.lineno}: {error!r}"


def read_reference(
    directories: Sequence[str | os.PathLike[str]], runs: Sequence[Run]
) -> pd.DataFrame | None:
    """Published values found beside the studies of these runs, or None.

    reference.csv has the columns chart, x, y, label and, if a chart has several panels, panel.
    """
    import pandas as pd

    folders_given = [Path(directory).resolve() for directory in directories]
    folders = dict.fromkeys([*folders_given, *(r.path.resolve().parent for r in runs)])
    tables = []
    for folder in folders:
        path = folder / "reference.csv"
        if not path.is_file():
            continue
        try:
            table = pd.read_csv(path, comment="#")
            missing = [name for name in REFERENCE_COLUMNS if name not in table]
            if missing:
                raise ValueError(f"no column {', '.join(missing)}")
            table[["x", "y"]] = table[["x", "y"]].astype(float)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{path}: {error}; expected chart,x,y,label") from error
        tables.append(table)
    return pd.concat(tables, ignore_index=True) if tables else None
