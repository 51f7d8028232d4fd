"""Runs in a folder -> files: each chart as PDF, PNG, SVG and a CSV of exactly what is drawn."""

from __future__ import annotations

import io
import json
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
from deepstack.records import Run, RunFolder, find_runs
from deepstack.records.files import replace
from deepstack.records.run import NOT_THE_EXPERIMENT

if TYPE_CHECKING:
    import pandas as pd

REFERENCE_COLUMNS = ("chart", "x", "y", "label")
# Forms of a figure -> what matplotlib would write into it that another day or version changes.
UNSAID = {
    "pdf": ("CreationDate", "Creator", "Producer"),
    "png": ("Software",),
    "svg": ("Date", "Creator"),
}


def draw(
    directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    charts: Sequence[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    at_step: int | None = None,
    diagnostic: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Draw charts (default: all) of the runs below a folder, into figures/ in each study or `out`.

    Charts compare the runs of one study; those of several go to `out`/<study>.  One run alone has
    its figures/ in its own folder.  Several folders make charts over the runs of all of them, in
    `out`; of runs with one configuration, seed included, the first alone is drawn.

    `say` gets a sentence for each run that cannot be read and is left out, and for each chart that
    these runs do not allow. Returns what was written.  Raises NothingMatchedError when there are no
    runs or nothing could be drawn, ResourceError when none of the runs can be read, ConfigError for
    an unknown chart, a reference.csv that cannot be used, or several folders without `out`; at the
    end BrokenChartError where the code of a chart has failed.
    """
    functions = {name: CHARTS[name] for name in charts or CHARTS}
    folders = [directory] if isinstance(directory, str | os.PathLike) else list(directory)
    if len(folders) > 1 and out is None:
        raise ConfigError(
            f"charts over the runs of {len(folders)} folders need a folder of their own: --to "
            "FOLDER (out=… from Python)"
        )
    studies, skipped = studies_in(folders)
    written: list[Path] = []
    broken: list[str] = []
    several = len(studies) > 1
    for study, members in studies.items():
        if not members:
            continue
        base = Path(folders[0]) if RunFolder(folders[0]).exists() else study
        target = base / "figures" if out is None else Path(out) / (study.name if several else "")
        options = Options(at_step, diagnostic or "grad_norm", read_reference(folders, members))
        where = f"{study.name}: " if several else ""
        for name, function in functions.items():
            found = attempt(name, function, members, options)
            if isinstance(found, DeepstackError):
                said = broken if isinstance(found, BrokenChartError) else skipped
                said.append(f"{where}{found}")
                continue
            try:
                written += save(found, target, name)
            except ResourceError as error:
                raise ResourceError(f"{error}; give another folder with --to") from error
    if broken:
        raise BrokenChartError("\n".join([*skipped, *broken]), written)
    if not written:  # the error says it all
        whole = any(studies.values())
        raise (NothingMatchedError if whole else ResourceError)("\n".join(skipped))
    for line in skipped:
        say(line)
    return written


def studies_in(
    folders: Sequence[str | os.PathLike[str]],
) -> tuple[dict[Path, list[Run]], list[str]]:
    """The runs that are looked at together, by study, and a sentence for each that is left out.

    Those of several folders are looked at as one study, `Path()`; of runs with one configuration,
    seed included, the first alone is taken.
    """
    together = len(folders) > 1
    studies: dict[Path, list[Run]] = {}
    skipped: list[str] = []
    seen: dict[str, Run] = {}
    for run in [run for folder in folders for run in find_runs(folder)]:
        members = studies.setdefault(Path() if together else run.path.parent, [])
        if together and (same := seen.setdefault(experiment_of(run), run)) is not run:
            if same.path.resolve() != run.path.resolve():
                skipped.append(f"{run.path} is left out: the same configuration as {same.path}")
        elif wrong := run.damage(layers=True):
            skipped.append(f"run {run.name} is left out: {wrong}")
        else:
            members.append(run)
    return studies, skipped


def attempt(
    name: str, function: ChartFunction, runs: Sequence[Run], options: Options
) -> Chart | DeepstackError:
    """The chart of these runs, or why there is none: NothingMatchedError where they do not have
    what it shows, BrokenChartError where its code has failed."""
    try:
        return function(list(runs), options=options)
    except NothingMatchedError as error:
        return NothingMatchedError(f"{name} is not drawn: {error}")
    except Exception as error:
        if isinstance(error, DeepstackError) and not isinstance(error, PluginError):
            raise
        return BrokenChartError(f"{name} is not drawn: its code has failed: {said_of(error)}", [])


def save(chart: Chart, folder: Path, name: str) -> list[Path]:
    """Write <name>.pdf, .png, .svg and .csv; the same chart gives the same bytes."""
    paths = []
    for kind in UNSAID:
        paths.append(folder / f"{name}.{kind}")
        replace(paths[-1], picture(chart, kind))
    paths.append(folder / f"{name}.csv")
    replace(paths[-1], numbers(chart))
    return paths


def picture(chart: Chart, kind: str) -> bytes:
    """The figure as a pdf, png or svg."""
    from deepstack.plots.style import paper

    buffer = io.BytesIO()
    with paper():
        chart.figure.savefig(buffer, format=kind, metadata=dict.fromkeys(UNSAID[kind]))
    return buffer.getvalue()


def numbers(chart: Chart) -> bytes:
    """What is drawn, as CSV."""
    table = chart.data.to_csv(index=False, float_format="%.9g", lineterminator="\n")
    return table.encode("utf-8", "backslashreplace")


def experiment_of(run: Run) -> str:
    """What makes a run this one: its configuration, seed included, without names and `runtime`."""
    kept = {k: v for k, v in run.config.items() if k not in NOT_THE_EXPERIMENT}
    return json.dumps([kept, run.meta.get("plugins", [])], sort_keys=True, default=str)


def said_of(error: Exception) -> str:
    """The line of a plugin, or the innermost one, and what it says."""
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

    given = [Path(directory).resolve() for directory in directories]
    folders = dict.fromkeys([*given, *(r.path.resolve().parent for r in runs)])
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
