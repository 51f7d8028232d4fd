"""One page of HTML that holds all of it: finding, tables, charts, settings, sources of numbers.

It fetches and runs nothing: charts are pictures inside of the page, with their CSV.  The page's
policy allows no script; the texts of a run folder are escaped.
"""

from __future__ import annotations

import base64
import hashlib
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
from deepstack.analysis.comparison import comparisons
from deepstack.analysis.fit import signed
from deepstack.analysis.outcomes import in_words
from deepstack.analysis.selection import Where, texts_of
from deepstack.analysis.settings import TASK, split_series
from deepstack.analysis.studies import (
    Folders,
    find_studies,
    list_folders,
    refuse_unknown_diagnostic,
)
from deepstack.config.write import yaml_of
from deepstack.errors import BrokenChartError, ConfigError, ResourceError
from deepstack.plots.chart import CHARTS, Chart, Options
from deepstack.plots.files import csv_bytes, read_reference, render, try_chart
from deepstack.records import ENDED, Run, run_rows, varying
from deepstack.records.cells import counted, printable, text
from deepstack.records.files import replace
from deepstack.records.published import writable
from deepstack.records.run import is_of_experiment
from deepstack.reports.finding import best_of_depths, sentences_of

PIXELS = 150  # of the page, for an inch of a figure
OPEN = 40  # rows up to which the table of runs is open
UPDATES = "update_vs_depth"  # its table has the exponents
# The first charts of the page; the others follow by name.
FIRST = (
    "final_loss_vs_depth", "outcomes", "update_vs_depth", "update_vs_step", "loss_vs_step"
)  # fmt: skip
# Columns in nats
LOSSES = (
    "val_loss", "val_sd", "val_low", "val_high", "unigram", "difference", "se", "diff_low",
    "diff_high", "below_unigram", "margin", "margin_low", "margin_high",
)  # fmt: skip
NOT_SHOWN = ("best", "path")  # keys of rows that are no columns


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
    folder.  The same runs give the same bytes.  Several folders make one section, and need `to`.

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
    such links and is loaded again every few seconds.
    """
    studies, skipped = find_studies(folders, partial(Run.damage, layers=True), where, sort, last)
    readable = {study: runs for study, runs in studies.items() if runs}
    if not readable:
        raise ResourceError("\n".join(skipped))
    refuse_unknown_diagnostic(diagnostic, (run for runs in readable.values() for run in runs))
    sections, broken = [], []
    charts = list(dict.fromkeys([*FIRST, *CHARTS]))
    rows = comparisons(readable, against, best)
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
        section = section_of(name, runs, path, rows[study], best)
        section["finding"] = sentences_of(runs, section["best_of_depths"], updates)
        sections.append(section | {"pictures": pictures, "left_out": left_out})
    values = {"against": against, "at-step": at_step, "diagnostic": diagnostic}
    values |= {"sort": sort, "last": last}
    options = [f"--{name}={value}" for name, value in values.items() if value is not None]
    options += [f"--where={condition}" for condition in texts_of(where)]
    words = [*map(str, folders), *options, *(f"--best={key}" for key in best)]
    return Page(printable(render_page(sections, words, skipped, against, best, path is None)),
                skipped, broken)  # fmt: skip


def section_of(
    name: str,
    runs: Sequence[Run],
    path: Path | None,
    rows: list[dict[str, Any]],
    best: Sequence[str],
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
        "best_of_depths": best_of_depths(runs, best),
        "rows": rows,
        "runs": listed,
        "environments": environments(runs),
        "shared": shared(runs),
        "example": shlex.quote(str(runs[0].path)),
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


def environments(runs: Sequence[Run]) -> list[str]:
    """Return the environments of runs and their counts: versions, device, commit, plugins."""
    counts: Counter[str] = Counter()
    for run in runs:
        git, plugins = run.meta.get("git") or {}, run.meta.get("plugins") or []
        facts = run.meta.get("environment", {}) | {
            "commit": str(git.get("commit") or "")[:12] + " + changes" * bool(git.get("dirty")),
            "plugins": ", ".join(str(plugin.get("file")) for plugin in plugins),
        }
        counts[
            ", ".join(f"{k} {text(v)}" for k, v in facts.items() if v not in (None, "", {}))
        ] += 1
    return [f"{counted('{} runs', count)}: {facts}" for facts, count in counts.items()]


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
    """A chart as the page holds it: svg and csv as data: addresses, the width in pixels."""
    svg, csv = (
        base64.b64encode(c).decode("ascii") for c in (render(chart, "svg"), csv_bytes(chart))
    )
    return {
        "name": name,
        "title": chart.title,
        "svg": f"data:image/svg+xml;base64,{svg}",
        "csv": f"data:text/csv;base64,{csv}",
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
    """Return the page as text; live: whether a browser loads it again every few seconds."""
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
        "columns": columns_of,
        "cell": cell,
        "counted": lambda number, form: counted(form, number),
    }
    style = files("deepstack.reports").joinpath("page.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode("utf-8")).digest()).decode("ascii")
    return environment.get_template("page.html").render(
        sections=sections,
        skipped=skipped,
        open=OPEN,
        against=against,
        best=best,
        live=live,
        style=Markup(style),
        style_digest=digest,
        command=shlex.join(["deepstack", "report", *words]),
    )


def columns_of(rows: Sequence[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Return the columns of a table of rows, and whether they hold numbers."""
    return [
        (key, any(isinstance(row[key], int | float) for row in rows))
        for key in rows[0]
        if key not in NOT_SHOWN
    ]


def cell(value: Any, key: str) -> str:
    """Return a value as a cell; all losses have three decimals."""
    return signed(value, 3) if isinstance(value, float) and key in LOSSES else text(value)
