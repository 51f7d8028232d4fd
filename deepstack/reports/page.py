"""One page of HTML that holds all of it: tables, charts, settings, where each number is from.

It fetches nothing and runs nothing: charts are pictures inside of the page, and the texts of a
run folder are escaped.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deepstack.analysis.captions import title_of
from deepstack.analysis.comparison import comparisons
from deepstack.analysis.series import split_series
from deepstack.analysis.settings import TASK
from deepstack.analysis.statistics import update_column
from deepstack.analysis.studies import find_studies
from deepstack.config.write import yaml_of
from deepstack.errors import BrokenChartError, ConfigError, ResourceError
from deepstack.plots.chart import CHARTS, Chart, Options
from deepstack.plots.draw import csv_bytes, read_reference, render, try_chart
from deepstack.records import ENDED, Run, run_rows, varying
from deepstack.records.cells import counted, printable, text
from deepstack.records.files import replace
from deepstack.records.run import is_of_experiment

PIXELS = 150  # of the page, for an inch of a figure
OPEN = 40  # rows up to which the table of runs is open
# The first charts of the page; the others follow by name.
FIRST = (
    "final_loss_vs_depth", "outcomes", "update_vs_depth", "update_vs_step", "loss_vs_step"
)  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """A chart in the page.  svg, csv: data addresses; width in pixels."""

    name: str
    title: str
    svg: str
    csv: str
    width: int


@dataclass
class Section:
    """The values of one study on the page.

    rows: of `comparison`, each with `best`, whether its val_loss is the least of its depth.  runs:
    of `run_rows`, each with its folder, `path`.  shared: settings of all runs, as YAML.  example:
    the folder of one of them.  notes: remarks for the reader.  left_out: why charts are missing.
    """

    name: str
    title: str
    states: str
    rows: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    environments: list[dict[str, Any]]
    shared: str
    example: str
    measure: str
    notes: list[str]
    pictures: list[Picture] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def report(
    directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    to: str | os.PathLike[str] | None = None,
    against: str | None = None,
    best: Sequence[str] = (),
    at_step: int | None = None,
    diagnostic: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write one HTML file of all runs below a folder: report.html in it, or `to`.

    A section a study: settings and depths compared (`against` and `best` are those of `compare`),
    every chart that its runs allow, each with its numbers as CSV, the settings that they share, the
    environment, and every run with its folder.  The same runs give the same bytes.  Several folders
    make one section, and need `to`.

    `say` gets a sentence for each chart as it is drawn and for each run that cannot be read.
    Returns the file.  Raises NothingMatchedError without runs, ResourceError where none can be
    read, ConfigError for several folders without `to`, and what `compare` raises; when the page is
    written BrokenChartError where the code of a chart has failed.
    """
    folders = [directory] if isinstance(directory, str | os.PathLike) else list(directory)
    if len(folders) > 1 and to is None:
        raise ConfigError(
            f"a report on the runs of {len(folders)} folders needs a file of its own: --to FILE "
            "(to=… from Python)"
        )
    path = Path(folders[0]) / "report.html" if to is None else Path(to)
    if path.is_dir():
        path = path / "report.html"
    studies, skipped = find_studies(folders, partial(Run.damage, layers=True))
    readable = {study: runs for study, runs in studies.items() if runs}
    if not readable:
        raise ResourceError("\n".join(skipped))
    sections, broken = [], []
    rows = comparisons(readable, against, best)
    for study, runs in readable.items():
        name = study.resolve().name if study != Path() else " and ".join(map(str, folders))
        section = section_of(name, runs, path, rows[study])
        options_of_charts = Options(
            at_step, diagnostic or "grad_norm", read_reference(folders, runs)
        )
        for chart in dict.fromkeys([*FIRST, *CHARTS]):
            say(f"{name}: {chart}")
            result = try_chart(chart, CHARTS[chart], runs, options_of_charts)
            if isinstance(result, Chart):
                section.pictures.append(picture_of(chart, result))
                continue
            section.left_out.append(str(result))
            broken += [f"{name}: {result}"] if isinstance(result, BrokenChartError) else []
        sections.append(section)
    chart_options = {"against": against, "at-step": at_step, "diagnostic": diagnostic}
    options = [f"--{name}={value}" for name, value in chart_options.items() if value is not None]
    options += [f"--best={key}" for key in best]
    words = [*map(str, folders), *options]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, printable(page(sections, words, skipped, against, best)).encode("utf-8"))
    except (OSError, ResourceError) as error:
        raise ResourceError(f"{error}; give another file with --to") from error
    for line in skipped:
        say(line)
    if broken:
        raise BrokenChartError("\n".join(broken), [path])
    return path


def section_of(name: str, runs: Sequence[Run], path: Path, rows: list[dict[str, Any]]) -> Section:
    """Return the section of a study without charts; rows: those of `comparison`."""
    one_task = len({run.get(TASK) for run in runs}) == 1
    for row in rows:
        losses = [r["val_loss"] for r in rows if r["depth"] == row["depth"]]
        same = [loss for loss in losses if loss is not None]
        row["best"] = one_task and len(same) > 1 and row["val_loss"] == min(same)
    listed = run_rows(runs)
    for run, row in zip(runs, listed, strict=True):
        row.pop("study")
        row["path"] = Path(os.path.relpath(run.path, path.resolve().parent)).as_posix()
    states = Counter(run.state for run in runs)
    return Section(
        name=name,
        title=title_of(runs, split_series(runs)[0]),
        states=", ".join(f"{number} {state}" for state, number in states.most_common()),
        rows=rows,
        runs=listed,
        environments=environments(runs),
        shared=shared(runs),
        example=shlex.quote(str(runs[0].path)),
        measure="‖ΔF‖" if update_column(runs) == "model_update" else "‖ΔF‖/‖F₀‖",
        notes=notes_on(runs),
    )


def shared(runs: Sequence[Run]) -> str:
    """The settings that all these runs have in common, as YAML."""
    different = set(varying(runs))
    settings: dict[str, Any] = {}
    for key, value in runs[0].flat_config.items():
        if key not in different and is_of_experiment(key):
            *sections, last = key.split(".")
            section = settings
            for word in sections:
                section = section.setdefault(word, {})
            section[last] = value
    return yaml_of(settings)


def environments(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the environments of runs and their counts: versions, device, commit, plugins."""
    entries: dict[str, dict[str, Any]] = {}
    for run in runs:
        parts = [run.meta.get(key) for key in ("environment", "git")]
        environment, git = (dict(part) if isinstance(part, dict) else {} for part in parts)
        environment["commit"] = str(git.get("commit") or "")[:12] + " + changes" * bool(
            git.get("dirty")
        )
        plugins = run.meta.get("plugins")
        plugin_files = (
            [p for p in plugins if isinstance(p, dict)] if isinstance(plugins, list) else []
        )
        environment["plugins"] = ", ".join(str(plugin.get("file")) for plugin in plugin_files)
        entry = entries.setdefault(
            json.dumps(environment, sort_keys=True), {"made": environment, "runs": 0}
        )
        entry["runs"] += 1
    return list(entries.values())


def notes_on(runs: Sequence[Run]) -> list[str]:
    """Return notes on runs that failed, diverged or have not ended."""
    notes = []
    for run in runs:
        if run.state in ("failed", "out_of_memory", "diverged"):
            why = " ".join(str(run.status.get("error") or "").split())
            notes.append(f"{run.name}: {run.state} at step {run.status.get('step')}: {why}")
        elif run.state not in ENDED:
            notes.append(f"{run.name}: {run.state}, not at its end")
    return notes


def picture_of(name: str, chart: Chart) -> Picture:
    """A chart as the page holds it."""
    return Picture(
        name=name,
        title=chart.title,
        svg=address("image/svg+xml", render(chart, "svg")),
        csv=address("text/csv", csv_bytes(chart)),
        width=round(float(chart.figure.get_figwidth()) * PIXELS),
    )


def address(kind: str, content: bytes) -> str:
    """A data: address that holds the content."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def page(
    sections: Sequence[Section],
    words: Sequence[str],
    skipped: Sequence[str],
    against: str | None,
    best: Sequence[str],
) -> str:
    """The page as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("deepstack.reports", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "address_of": lambda path: quote(os.fsencode(path)),  # a path need not be UTF-8
        "cell": cell,
        "counted": lambda number, form: counted(form, number),
    }
    return environment.get_template("page.html").render(
        sections=sections,
        skipped=skipped,
        open=OPEN,
        against=against,
        best=best,
        command=shlex.join(["deepstack", "report", *words]),
    )


def cell(value: Any, form: str | None = None) -> str:
    """A value as a cell; numbers of one column in one form, so that their points are aligned."""
    if value in (None, ""):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return text(value) if form is None else format(value, form)
