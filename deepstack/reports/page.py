"""One page of HTML that holds all of it: finding, tables, charts, settings, sources of numbers.

It fetches nothing: charts are pictures inside of the page, with their CSV.  Its only script is
page.js, which the page's policy names by its sha256; the texts of a run folder are escaped.
"""

import base64
import hashlib
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from deepstack.analysis.captions import title_of
from deepstack.analysis.comparison import best_keys, comparisons
from deepstack.analysis.outcomes import in_words
from deepstack.analysis.selection import Where, texts_of
from deepstack.analysis.settings import TASK, split_series
from deepstack.analysis.statistics import update_column
from deepstack.analysis.studies import (
    Folders,
    find_studies,
    list_folders,
    refuse_unknown_diagnostic,
)
from deepstack.config.identity import is_of_experiment
from deepstack.config.write import yaml_of
from deepstack.errors import BrokenChartError, ConfigError, ResourceError
from deepstack.plots.chart import CHARTS, Chart, Options
from deepstack.plots.files import csv_bytes, read_reference, render, try_chart
from deepstack.records import ENDED, Run, run_rows, varying
from deepstack.records.cells import counted, printable, text
from deepstack.records.files import replace
from deepstack.records.published import writable
from deepstack.reports.figures import describe_figure
from deepstack.reports.finding import finding_of

PIXELS = 150  # of the page, for an inch of a figure
OPEN = 40  # rows up to which the table of runs is open
UPDATES = "update_vs_depth"  # its table has the exponents
# The first charts of the page; the others follow by name.
FIRST = (
    "final_loss_vs_depth", "outcomes", "update_vs_depth", "update_vs_step", "loss_vs_step"
)  # fmt: skip


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
    best: Sequence[str] = (),
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
    (`against` and `best` are those of `compare`), and every chart that its runs allow, with its
    numbers as CSV.  Then follow the shared settings, the environment, and every run with its
    folder.  Tables can be sorted and
    filtered, and charts show their values.  The same runs give the same bytes.  Several folders
    make one section, and need `to`.

    where, last: as in `deepstack.load_runs`.  sort: the order of its table of runs.
    `say` gets a sentence for each chart as it is drawn and for each run that cannot be read;
    `started`, if it is given, gets that of a chart in its place, and the number of all charts.
    Returns the file.  Raises NothingMatchedError without runs, ResourceError where none can be
    read, ConfigError for several folders without `to`, and the errors of `compare`.  Raises
    BrokenChartError after it has written the page, if the code of a chart has failed.
    """
    folders = list_folders(directory)
    if len(folders) > 1 and to is None:
        raise ConfigError(
            f"a report on the runs of {len(folders)} folders needs a file of its own: --to FILE "
            "(to=… from Python)"
        )
    path = writable(Path(folders[0]) / "report.html") if to is None else Path(to)
    if path.is_dir():
        path = path / "report.html"
    started = started or (lambda chart, _: say(chart))
    selection: dict[str, Any] = {"where": where, "sort": sort, "last": last}
    built = build_page(folders, path, against, best, at_step, diagnostic, started, **selection)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, built.text.encode("utf-8"))
    except (OSError, ResourceError) as error:
        raise ResourceError(f"{error}; give another file with --to") from error
    for line in built.skipped:
        say(line)
    if built.broken:
        raise BrokenChartError("\n".join(built.broken), [path])
    return path


def build_page(
    folders: Sequence[str | os.PathLike[str]],
    path: Path | None,
    against: str | None = None,
    best: Sequence[str] = (),
    at_step: int | None = None,
    diagnostic: str | None = None,
    started: Callable[[str, int], None] = lambda chart, total: None,
    *,
    where: Where = (),
    sort: str | None = None,
    last: int | None = None,
) -> Page:
    """Return the page of `report`.

    path: the file that links to run folders start from; None for the page of a server, which has no
    such links and looks for a newer page.
    """
    studies, skipped = find_studies(folders, partial(Run.damage, layers=True), where, sort, last)
    readable = {study: runs for study, runs in studies.items() if runs}
    if not readable:
        raise ResourceError("\n".join(skipped))
    refuse_unknown_diagnostic(diagnostic, (run for runs in readable.values() for run in runs))
    sections, broken = [], []
    charts = list(dict.fromkeys([*FIRST, *CHARTS]))
    rows, keys = comparisons(readable, against, best), best_keys(readable, best)
    for study, runs in readable.items():
        name = study.resolve().name if study != Path() else " and ".join(map(str, folders))
        chart_options = Options(at_step, diagnostic or "grad_norm", read_reference(folders, runs))
        pictures, left_out, updates = [], [], None
        for chart in charts:
            started(f"{name}: {chart}", len(readable) * len(charts))
            result = try_chart(chart, CHARTS[chart], runs, chart_options)
            if isinstance(result, Chart):
                pictures.append(picture_of(chart, result))
                updates = result.data if chart == UPDATES else updates
                continue
            left_out.append(str(result))
            broken += [f"{name}: {result}"] if isinstance(result, BrokenChartError) else []
        section = section_of(name, runs, path, rows[study])
        section["finding"] = finding_of(runs, keys[study], updates)
        sections.append(section | {"pictures": pictures, "left_out": left_out})
    values = {"against": against, "at-step": at_step, "diagnostic": diagnostic}
    values |= {"sort": sort, "last": last}
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    options += [f"--where={condition}" for condition in texts_of(where)]
    words = [*map(str, folders), *options, *(f"--best={key}" for key in best)]
    return Page(printable(render_page(sections, words, skipped, against, best, path is None)),
                skipped, broken)  # fmt: skip


def section_of(
    name: str, runs: Sequence[Run], path: Path | None, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the values of one study on the page, without its charts.

    rows: of `comparison`, each with `best`, whether its val_loss is the least of its depth.  runs:
    of `run_rows`, each with the link to its folder, `path`.  example: the folder of one run.
    """
    one_task = len({run.get(TASK) for run in runs}) == 1
    for row in rows:
        losses = [r["val_loss"] for r in rows if r["depth"] == row["depth"]]
        same = [loss for loss in losses if loss is not None]
        row["outcome"] = in_words(row["outcome"])
        row["best"] = one_task and len(same) > 1 and row["val_loss"] == min(same)
    listed = run_rows(runs)
    for run, row in zip(runs, listed, strict=True):
        row.pop("study")
        beside = None if path is None else os.path.relpath(run.path, path.resolve().parent)
        row["path"] = beside and Path(beside).as_posix()
    states = Counter(run.state for run in runs)
    return {
        "name": name,
        "title": title_of(runs, split_series(runs)[0]),
        "states": ", ".join(f"{number} {state}" for state, number in states.most_common()),
        "rows": rows,
        "runs": listed,
        "environments": environments(runs),
        "shared": shared(runs),
        "example": shlex.quote(str(runs[0].path)),
        "measure": "‖ΔF‖" if update_column(runs) == "model_update" else "‖ΔF‖/‖F₀‖",
        "notes": notes_on(runs),
    }


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
        meta = {key: value if isinstance(value, dict) else {} for key, value in run.meta.items()}
        git = meta.get("git", {})
        commit = str(git.get("commit") or "")[:12] + " + changes" * bool(git.get("dirty"))
        plugins = run.meta.get("plugins")
        known = [p for p in plugins if isinstance(p, dict)] if isinstance(plugins, list) else []
        files = ", ".join(str(plugin.get("file")) for plugin in known)
        environment = meta.get("environment", {}) | {"commit": commit, "plugins": files}
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


def picture_of(name: str, chart: Chart) -> dict[str, Any]:
    """A chart as the page holds it: svg and csv as data: addresses, the width in pixels.

    panels: the axes and series with which the page's script draws the CSV.
    """
    svg, csv = (
        base64.b64encode(c).decode("ascii") for c in (render(chart, "svg"), csv_bytes(chart))
    )
    return {
        "name": name,
        "title": chart.title,
        "svg": f"data:image/svg+xml;base64,{svg}",
        "csv": f"data:text/csv;base64,{csv}",
        "panels": describe_figure(chart),
        "width": round(float(chart.figure.get_figwidth()) * PIXELS),
    }


def render_page(
    sections: Sequence[dict[str, Any]],
    words: Sequence[str],
    skipped: Sequence[str],
    against: str | None,
    best: Sequence[str],
    live: bool = False,
) -> str:
    """Return the page as text; live: whether it looks for a newer page at its own address."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

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
        "signless": lambda value: f"{value:.3f}".replace("-", "−"),
    }
    script, style = (
        files("deepstack.reports").joinpath(name).read_text("utf-8")
        for name in ("page.js", "page.css")
    )
    panels = {
        f"s{number}-{picture['name']}": picture["panels"]
        for number, section in enumerate(sections, start=1)
        for picture in section["pictures"]
    }
    return environment.get_template("page.html").render(
        sections=sections,
        skipped=skipped,
        open=OPEN,
        against=against,
        best=best,
        live=live,
        policy=policy_of(script, style, live),
        script=Markup(script),
        style=Markup(style),
        data=Markup(json_block(panels)),
        command=shlex.join(["deepstack", "report", *words]),
    )


def policy_of(script: str, style: str, live: bool) -> str:
    """Return the content security policy: pictures in the page, this script and this style."""
    digests = [
        base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")
        for text in (script, style)
    ]
    return (
        f"default-src 'none'; img-src data:; script-src 'sha256-{digests[0]}'; "
        f"style-src 'sha256-{digests[1]}'; base-uri 'none'; form-action 'none'"
        + "; connect-src 'self'"
        * live
    )


def json_block(value: Any) -> str:
    """Return JSON that can stand in a script element: ASCII, without `<`, `>` and `&`."""
    text = json.dumps(value, default=float, separators=(",", ":"), sort_keys=True)
    return text.translate({ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"})


def cell(value: Any, form: str | None = None) -> str:
    """A value as a cell; numbers of one column in one form, so that their points are aligned."""
    if value in (None, ""):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return text(value) if form is None else format(value, form)
