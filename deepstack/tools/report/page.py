"""One page of HTML that holds all of it: finding, tables, charts, settings, sources of numbers.

It fetches nothing: charts are pictures inside of the page, with their CSV.  Its only script is
uPlot with the scripts of this folder, which the page's policy names by its sha256; the texts of a
run folder are escaped.
"""

import base64
import hashlib
import json
import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deepstack.base import (
    BrokenChartError,
    ConfigError,
    ResourceError,
    counted,
    printable,
    short_text,
    tally,
)
from deepstack.config import yaml_of
from deepstack.plots import CHARTS, Chart, Options, csv_bytes, read_reference, render, try_chart
from deepstack.records import ENDED, Run, followed, replace, writable
from deepstack.runs import (
    FAR,
    LEARNT,
    NO_CHOICE,
    Folders,
    Runs,
    Where,
    best_keys,
    best_rows,
    comparisons,
    find_studies,
    has_one_task,
    interval_cell,
    list_folders,
    nats_cell,
    outcome_words,
    refuse_unknown_diagnostic,
    shared_settings,
    texts_of,
    title_of,
)
from deepstack.tools.report.figures import describe_figure
from deepstack.tools.report.finding import finding_of

PIXELS = 150  # of an inch of a figure
READY_SECONDS = 2.0
UPDATES = "update_vs_depth"  # the chart with the exponents of the finding
# The charts that come first; the others follow in the order of their registration.
FIRST = ("final_loss_vs_depth", "outcomes", UPDATES, "update_vs_step", "loss_vs_step")


SCRIPTS = ("parts.js", "maps.js", "charts.js", "page.js")


@dataclass(frozen=True)
class Page:
    """The text of a report, the runs that it leaves out, and the charts whose code has failed."""

    text: str
    skipped: list[str]
    broken: list[str]


def report(
    directory: Folders,
    to: str | os.PathLike[str] | None = None,
    against: str | None = None,
    best: str | Sequence[str] = (),
    at_step: int | None = None,
    diagnostic: str | None = None,
    say: Callable[[str], None] = lambda _: None,
    started: Callable[[str, int], None] | None = None,
    *,
    where: Where = (),
    sort: str | None = None,
    last: int | None = None,
) -> Path:
    """Write one HTML file of all runs below a folder: report.html in it, or `to`.

    Each study has a section.  It holds the finding in words, settings and depths compared
    (`against` and `best`: as in `compare`), and every chart that its runs allow, with its
    numbers as CSV.  Then follow the shared settings, the environment, and every run with its
    folder.  Tables can be sorted and
    filtered, and charts show their values.  The same runs give the same bytes.  Several folders
    make one section, and need `to`.

    where, last: as in `deepstack.load_runs`.
    sort: the order of its table of runs.

    `say` gets a sentence for each chart as it is drawn and for each run that cannot be read;
    `started`, if it is given, gets the sentence of a chart instead, and the number of all charts.
    Returns the file.
    Raises NothingMatchedError without runs, ResourceError where none can be read, ConfigError for
    several folders without `to`, and the errors of `compare`.
    Raises BrokenChartError after it has written the page, if the code of a chart has failed.
    """
    folders = list_folders(directory)
    path = file_of(folders, to, "report.html")
    tell = started or (lambda chart, _: say(chart))
    selection: dict[str, Any] = {"where": where, "sort": sort, "last": last}
    page = build_page(folders, path, against, best, at_step, diagnostic, tell, **selection)
    write(path, page.text)
    for line in page.skipped:
        say(line)
    if page.broken:
        raise BrokenChartError("\n".join(page.broken), [path])
    return path


def file_of(
    folders: Sequence[str | os.PathLike[str]], to: str | os.PathLike[str] | None, name: str
) -> Path:
    """Return the file of a report on the runs of some folders: `to`, or this name in the folder."""
    if len(folders) > 1 and to is None:
        raise ConfigError(
            f"a report on the runs of {len(folders)} folders needs a file of its own: --to FILE "
            "(to=… from Python)"
        )
    path = writable(Path(folders[0]) / name) if to is None else Path(to)
    if to is not None and path.is_dir():
        path = path / name
    if path.exists() and not path.is_file():
        raise ConfigError(f"--to {path}: found a device or a pipe; allowed a file such as {name}")
    return followed(path.parent) / path.name


def write(path: Path, text: str) -> None:
    """Write a report, or raise ResourceError with what to type instead."""
    try:
        replace(path, printable(text).encode("utf-8"))
    except ResourceError as error:
        raise ResourceError(f"{error}; give another file with --to") from error


def build_page(
    folders: Sequence[str | os.PathLike[str]],
    path: Path | None,
    against: str | None = None,
    best: str | Sequence[str] = (),
    at_step: int | None = None,
    diagnostic: str | None = None,
    started: Callable[[str, int], None] = lambda chart, total: None,
    *,
    where: Where = (),
    sort: str | None = None,
    last: int | None = None,
    ready: Callable[[Page], None] | None = None,
) -> Page:
    """Return the page of `report`.

    path: the file that links to run folders start from; None for the page of a server, which has no
        such links and looks for a newer page.
    ready: gets the page without charts, and then with those that are drawn, every READY_SECONDS.
    """
    all_studies, skipped = find_studies(
        folders, partial(Run.damage, layers=True), where, sort, last
    )
    studies = {study: runs for study, runs in all_studies.items() if runs}
    if not studies:
        raise ResourceError("\n".join(skipped))
    refuse_unknown_diagnostic(diagnostic, [run for runs in studies.values() for run in runs])
    rates = "all" if NO_CHOICE in best else "best"
    keys = best_keys(studies, best)
    best = list(dict.fromkeys(key for of_study in keys.values() for key in of_study))
    tables = comparisons(studies, against, keys)
    charts = list(dict.fromkeys([*FIRST, *CHARTS]))
    sections: list[dict[str, Any]] = []
    panels: dict[str, Any] = {}
    broken: list[str] = []
    values = {"against": against, "at-step": at_step, "diagnostic": diagnostic}
    values |= {"sort": sort, "last": last}
    options = [f"--{key}={value}" for key, value in values.items() if value is not None]
    options += [f"--where={condition}" for condition in texts_of(where)]
    options += [f"--best={key}" for key in [*best, *([NO_CHOICE] if rates == "all" else [])]]

    def page_now() -> Page:
        page = render_page(
            sections=sections,
            command=shlex.join(["deepstack", "report", *map(str, folders), *options]),
            skipped=skipped,
            against=against,
            best=best,
            learnt=LEARNT,
            far=FAR,
            data=panels,
            live=None if path else hashlib.sha256(repr(tables).encode()).hexdigest(),
        )
        return Page(page, skipped, broken)

    for study, runs in studies.items():
        name = runs[0].study if len(folders) == 1 else " and ".join(map(str, folders))
        section = section_of(name, runs, tables[study], path)
        section["finding"] = finding_of(runs, keys[study], None)
        sections.append(section | {"pictures": [], "left_out": [], "to_draw": len(charts)})
    shown = -math.inf
    for number, (section, (study, runs)) in enumerate(
        zip(sections, studies.items(), strict=True), 1
    ):
        published = read_reference(folders, runs)
        chart_options = Options(at_step, diagnostic or "grad_norm", published, rates=rates)
        for chart_name in charts:
            if ready and time.monotonic() - shown > READY_SECONDS:
                ready(page_now())
                shown = time.monotonic()
            started(f"{section['name']}: {chart_name}", len(charts) * len(studies))
            chart = try_chart(chart_name, CHARTS[chart_name], runs, chart_options)
            section["to_draw"] -= 1
            if isinstance(chart, Chart):
                section["pictures"].append(picture_of(chart_name, chart))
                panels[f"s{number}-{chart_name}"] = describe_figure(chart)
                if chart_name == UPDATES:
                    section["finding"] = finding_of(runs, keys[study], chart.data)
                continue
            section["left_out"].append(str(chart))
            if isinstance(chart, BrokenChartError):
                broken.append(f"{section['name']}: {chart}")
    return page_now()


def section_of(
    name: str, runs: Runs, rows: Sequence[dict[str, Any]], path: Path | None
) -> dict[str, Any]:
    """Return the values of one study on the page, without its charts.

    rows: of `comparison`.
    path: the file that links to run folders start from, or None.
    """
    several_tasks = [] if has_one_task(runs) else [""]
    best = best_rows(rows, several_tasks)
    for number, row in enumerate(rows):
        row["best"] = number in best
        row["outcome"] = outcome_words(row["outcome"])
    return {
        "name": name,
        "title": title_of(runs, runs.series()),
        "states": tally(run.state for run in runs),
        "notes": [note_on(run) for run in runs if run.state not in ENDED],
        "rows": rows,
        "runs": [
            row | {"path": path and os.path.relpath(run.path, path.resolve().parent)}
            for row, run in zip(runs.rows, runs, strict=True)
        ],
        "example": next((shlex.quote(str(run.path)) for run in runs if can_rerun(run)), ""),
        "shared": yaml_of(shared_settings(runs)),
        "environments": environments(runs),
    }


def can_rerun(run: Run) -> bool:
    """Return whether deepstack has trained a run: not a command or a probe's own model."""
    return not {"hidden", "trainer"} & run.meta.keys()


def environments(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the environments of runs and their counts: versions, device, commit, plugins."""
    counts = Counter(json.dumps(environment_of(run)) for run in runs)
    return [{"runs": count, "made": json.loads(made)} for made, count in counts.items()]


def of_type(kind: type, value: Any) -> Any:
    """Return a value of a file if it has this type, else an empty one."""
    return value if isinstance(value, kind) else kind()


def environment_of(run: Run) -> dict[str, Any]:
    """Return environment, commit and plugins of a run, without values that have another type."""
    environment, git = (of_type(dict, run.meta.get(name)) for name in ("environment", "git"))
    changes = " + changes" if git.get("dirty") else ""
    plugins = [of_type(dict, plugin) for plugin in of_type(list, run.meta.get("plugins"))]
    return {
        **environment,
        "commit": str(git.get("commit") or "")[:12] + changes,
        "plugins": ", ".join(str(plugin["file"]) for plugin in plugins if "file" in plugin),
    }


def note_on(run: Run) -> str:
    """Return a note on a run that failed or has not ended."""
    if run.state in ("running", "interrupted"):
        return f"{run.name}: {run.state}, not at its end"
    why = " ".join(str(run.status.get("error") or "").split())
    return f"{run.name}: {run.state} at step {run.status.get('step')}: {why}"


def picture_of(name: str, chart: Chart) -> dict[str, Any]:
    """Return a chart as the page holds it: svg and csv as data: addresses, the width in pixels."""
    return {
        "name": name,
        "title": chart.title,
        "svg": f"data:image/svg+xml;base64,{base64_text(render(chart, 'svg'))}",
        "csv": f"data:text/csv;base64,{base64_text(csv_bytes(chart))}",
        "width": round(PIXELS * chart.figure.get_figwidth()),
    }


def base64_text(data: bytes) -> str:
    """Return data in base64 as text."""
    return base64.b64encode(data).decode()


def render_page(**values: Any) -> str:
    """Return the page with these values of its template as text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("deepstack.tools.report", "")
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "cell": cell_text,
        "counted": lambda value, form: counted(form, value),
        "nats": nats_cell,
        "interval": interval_cell,
        "address_of": lambda path: quote(os.fsencode(path)),
        "sha256": lambda source: base64_text(hashlib.sha256(source.encode()).digest()),
    }
    environment.policies["json.dumps_kwargs"] = {"default": float, "sort_keys": True}

    def read(*names: str) -> str:
        return "\n".join(loader.get_source(environment, name)[0] for name in names)

    uplot = f"/* uPlot: {read('uplot/LICENSE')}*/\n{read('uplot/uplot.min.js')}"  # unchanged
    script = f'{uplot}\n(() => {{\n"use strict";\n{read(*SCRIPTS)}\n}})();'
    style = read("uplot/uplot.min.css", "page.css")
    return environment.get_template("page.html").render(script=script, style=style, **values)


def cell_text(value: Any, form: str | None = None) -> str:
    """Return a value as a cell; numbers of one column in one form, so that points are aligned."""
    if value in (None, ""):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return short_text(value) if form is None else format(value, form)
