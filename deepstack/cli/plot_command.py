"""The command `deepstack plot [CHART …] DIR`, and its two charts of any quantity."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.cells import cell_len

from deepstack.base.errors import BrokenChartError, ConfigError
from deepstack.base.text import counted, fold_lines
from deepstack.cli import options as opt
from deepstack.cli.commands import command
from deepstack.cli.completion import complete_chart_or_folder, complete_names
from deepstack.cli.output import emit, log, show_work, terminal_width
from deepstack.cli.several_studies import newest_note, studies_below

MAIN_FORMATS = "png,csv"
BESIDE = {".csv": "CSV of its values", ".txt": "TXT of its settings"}
FEW_CHARTS = 2  # up to which a terminal shows the path of each file
axis, look, files = (
    partial(opt.option, panel=heading)
    for heading in ("The charts metric, map and scatter", "Appearance", "Files")
)


def refuse_charts(charts: Sequence[str], option: str) -> None:
    """Raise ConfigError for a chart beside an option that is for all charts."""
    if charts:
        raise ConfigError(f"{option}: found beside the chart {charts[0]}; allowed without a chart")


@command(
    "Results", "deepstack plot metric results/quick --x depth --y val_loss --by scheme", place=1
)
def plot_command(
    words: list[str] = typer.Argument(
        ["results"],
        metavar="CHART|DIR",
        help="Charts to draw (default: at most five main ones, of the newest study), and one "
        "folder, or several with --to. `metric` and `map` draw any quantity, `scatter` two columns "
        "of compare.",
        autocompletion=complete_chart_or_folder,
    ),
    every: bool = opt.flag("Draw all charts of all studies.", "--all"),
    why: bool = opt.flag(
        "Draw nothing; print which charts need other runs, and which runs.", "--why"
    ),
    at_step: opt.AtStep = None,
    diagnostic: opt.Diagnostic = None,
    where: opt.Where = [],
    sort: opt.Sort = None,
    last: opt.Last = None,
    best: opt.Best = [],
    to: Path | None = files("Folder for the figures (default: figures/ in each study)."),
    x: str | None = axis(
        "metric, map: a setting, or for metric step, layer or a column; scatter: a numeric column "
        "of compare.",
        metavar="KEY",
    ),
    y: str | None = axis(
        "metric: a logged column (val_loss, model_update, …) or a per-layer diagnostic; "
        "map: a setting; scatter: another column of compare.",
        metavar="COLUMN|KEY",
    ),
    by: str | None = axis("metric: the setting of the lines.", metavar="KEY"),
    value: str | None = axis("map: the column or diagnostic to show.", metavar="COLUMN"),
    layers: str | None = axis(
        "metric, map: mean (default), max, min, last or growth (rate per layer) of the "
        "layers, or one's number."
    ),
    schemes: str | None = look(
        "Only these schemes, in this order.",
        metavar="A,B",
        autocompletion=complete_names("schemes"),
    ),
    panels: str | None = look("The setting that makes the panels.", metavar="KEY"),
    smooth: int = look("Average curves against the step over so many rows.", default=1, min=1),
    x_scale: str | None = look("Scale of x axes.", metavar="lin|log"),
    y_scale: str | None = look("Scale of y axes and colours.", metavar="lin|log"),
    style: str = look(
        "paper: column width, SVG text as text; title and settings go to a .txt file.",
        default="default",
        metavar="default|paper",
    ),
    width: float | None = look("Width of the figures in inches."),
    font: str | None = look("Name of an installed font."),
    formats: str | None = files(
        "Files to write: pdf, png, svg, csv (default: all; of main charts png,csv).",
        "--format",
        metavar="A,B",
    ),
    plugin: opt.Plugins = [],
) -> None:
    """Draw charts of the runs in a folder, each as a figure and a CSV of the drawn values.

    Without a name: at most five main charts of one study; prints the title and the figure of each,
    with a tab between them. With names or --all: as PDF and SVG too; prints each file.
    """
    opt.load_plugins(plugin)
    from deepstack.plots import plot

    charts, directories = charts_and_folders(words)
    if every or why:
        refuse_charts(charts, "--all" if every else "--why")
    main = not (charts or every)
    paths: Any = ()
    notes: list[str] = []
    shown: list[tuple[str, Sequence[Path]]] = []
    if main and len(directories) == 1:
        studies = studies_below(directories[0], where, last)
        if len(studies) > 1:
            notes.append(newest_note(directories[0], studies))
            directories = [str(next(iter(studies)))]
    if why:
        show_reasons(directories, where, last, best)
        return
    try:
        with show_work("drawing charts") as work:
            paths = plot(
                directories if len(directories) > 1 else directories[0],
                charts or None,
                out=to,
                at_step=at_step,
                diagnostic=diagnostic,
                say=notes.append,
                step=work.step,
                written=lambda chart, files: shown.append((chart.title, files)),
                schemes=tuple(filter(None, (schemes or "").split(","))),
                panels=panels,
                smooth=smooth,
                x_scale=x_scale,
                y_scale=y_scale,
                style=style,
                width=width,
                font=font,
                formats=formats or (MAIN_FORMATS if main else None),
                main=main,
                x=x,
                y=y,
                by=by,
                value=value,
                layers=layers,
                where=where,
                sort=sort,
                last=last,
                best=best,
            )
    except BrokenChartError as error:
        paths = error.written
        raise
    finally:
        if main:
            show_titles(shown)
        else:
            show_files(paths)
        if main and shown:
            log(other_charts(directories, shown, where, last, best))
        for line in notes if charts else joined_notes(notes):
            log(line)


def charts_and_folders(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the charts, which commas may join, and the folders, which come in any order."""
    from deepstack.plots import CHARTS
    from deepstack.plots.arguments import WORDED

    folders = [word for word in words if Path(word).is_dir()]
    others = [word for word in words if word not in folders]
    charts = [part for word in others for part in word.split(",")]
    if not charts or folders:
        return charts, folders
    if charts[-1] in CHARTS or charts[-1] in WORDED:
        return charts, ["results"]
    return charts[: -len(others[-1].split(","))], [others[-1]]  # an unknown last word is a folder


def show_titles(charts: Sequence[tuple[str, Sequence[Path]]]) -> None:
    """Print the title and the first file of each chart; the figure comes before the CSV."""
    from deepstack.plots.texts import untypeset

    titles = [untypeset(title) for title, _ in charts]
    longest = max(map(cell_len, titles), default=0)
    for title, (_, files) in zip(titles, charts, strict=True):
        figure = min(files, key=lambda path: path.suffix == ".csv")
        gap = "\t" if terminal_width() is None else " " * (longest - cell_len(title) + 2)
        typer.echo(f"{title}{gap}{figure}")


def other_charts(
    directories: Sequence[str],
    drawn: Sequence[tuple[str, Sequence[Path]]],
    where: Sequence[str],
    last: int | None,
    best: Sequence[str],
) -> str:
    """Return the line on the files beside the figures, and on the charts that are not drawn.

    'beside each: CSV of its values, TXT of its settings; 9 more: --all; 15 need other runs: --why'.
    """
    from deepstack.plots.allowed import reasons_against

    names = {files[0].stem for _, files in drawn}
    studies = reasons_against(directories, where=where, last=last, best=best)
    reasons = next(iter(studies.values()))
    needing = sum(map(bool, reasons.values()))
    more = len([name for name, reason in reasons.items() if name not in names and not reason])
    kinds = {file.suffix: None for _, files in drawn for file in files[1:]}
    words = [meaning for kind, meaning in BESIDE.items() if kind in kinds]
    parts = [f"beside each: {', '.join(words)}"] if words else []
    parts += [f"{more} more: --all"] if more else []
    parts += [f"{needing} need other runs: --why"] if needing else []
    return "; ".join(parts)


def show_reasons(
    directories: Sequence[str], where: Sequence[str], last: int | None, best: Sequence[str]
) -> None:
    """Print a row for each chart that these runs do not allow, with the runs that it needs."""
    from deepstack.plots.allowed import reasons_against

    studies = reasons_against(directories, where=where, last=last, best=best)
    several = len(studies) > 1
    rows = [
        {**({"study": study.name} if several else {}), "chart": name, "why not": reason}
        for study, reasons in studies.items()
        for name, reason in reasons.items()
        if reason
    ]
    if rows:
        emit(rows, as_json=False)
    else:
        log("these runs allow every chart")


def show_files(paths: Sequence[Path]) -> None:
    """Print the paths of files; on a terminal, many of them as a line for each folder."""
    folders: dict[Path, dict[str, None]] = {}
    for path in paths:
        folders.setdefault(path.parent, {})[path.stem] = None
    if terminal_width() is None or sum(map(len, folders.values())) <= FEW_CHARTS:
        for path in paths:
            typer.echo(path)
        return
    endings = ", ".join(dict.fromkeys(path.suffix[1:] for path in paths))
    for folder, names in folders.items():
        line = f"{folder}: {counted('{} charts', len(names))} ({endings}): {', '.join(names)}"
        typer.echo(fold_lines(line, terminal_width() or len(line)))


def joined_notes(notes: Sequence[str]) -> list[str]:
    """Return the notes of all charts, with those on charts that are not drawn in one line."""
    from deepstack.plots.study_charts import NOT_DRAWN

    names = [note.partition(NOT_DRAWN)[0] for note in notes if NOT_DRAWN in note]
    if len(names) < 2:
        return list(notes)
    number = counted("{} charts", len(names))
    text = f"these runs do not allow {number} (--why has the reasons): "
    others = [note for note in notes if NOT_DRAWN not in note]
    return [*others, f"{text}{', '.join(dict.fromkeys(names))}"]
