"""The command `deepstack plot [CHART …] DIR`, and its two charts of any quantity."""

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from deepstack.base.errors import BrokenChartError, ConfigError
from deepstack.base.text import counted, fold_lines
from deepstack.cli import options as opt
from deepstack.cli.commands import command
from deepstack.cli.completion import complete_chart_or_folder, complete_names
from deepstack.cli.output import log, show_work, terminal_width
from deepstack.cli.several_studies import newest_note, studies_below

MAIN_FORMATS = "png,csv"
FEW_CHARTS = 2  # up to which a terminal shows the path of each file
NOT_DRAWN = " is not drawn: "
axis, look, files = (
    partial(opt.option, panel=heading)
    for heading in ("The charts metric, map and scatter", "Appearance", "Files")
)


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
        autocompletion=complete_names("schemes", ""),
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

    Without a name: at most five main charts of one study. With names or --all: as PDF and SVG too.
    """
    opt.load_plugins(plugin)
    from deepstack.plots import CHARTS, plot
    from deepstack.plots.arguments import WORDED

    # Charts, which may be joined by commas, and folders have any order.
    directories = [word for word in words if Path(word).is_dir()]
    others = [word for word in words if word not in directories]
    charts = [part for word in others for part in word.split(",")]
    if charts and not directories:  # an unknown last word is a folder
        is_chart = charts[-1] in CHARTS or charts[-1] in WORDED
        directories = ["results"] if is_chart else [others[-1]]
        charts = charts if is_chart else charts[: -len(others[-1].split(","))]
    if charts and every:
        raise ConfigError(f"--all: found beside the chart {charts[0]}; allowed without a chart")
    main = not (charts or every)
    paths: Any = ()
    notes: list[str] = []
    if main and len(directories) == 1:
        studies = studies_below(directories[0], where, last)
        if len(studies) > 1:
            notes.append(newest_note(directories[0], studies))
            directories = [str(next(iter(studies)))]
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
        show_files(paths)
        for line in notes if charts else joined_notes(notes):
            log(line)
        if main and paths:
            left = len(CHARTS) - len({path.stem for path in paths})
            words = ["deepstack", "plot", *directories, "--all", *(["--to", str(to)] if to else [])]
            number = counted("{} charts", left)
            log(f"{number} left out; to draw all that the runs allow: {shlex.join(words)}")


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
    names = [note.partition(NOT_DRAWN)[0] for note in notes if NOT_DRAWN in note]
    if len(names) < 2:
        return list(notes)
    number = counted("{} charts", len(names))
    text = f"these runs do not allow {number} (deepstack plot CHART DIR says why): "
    others = [note for note in notes if NOT_DRAWN not in note]
    return [*others, f"{text}{', '.join(dict.fromkeys(names))}"]
