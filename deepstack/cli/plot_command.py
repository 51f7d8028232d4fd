"""The command `deepstack plot [CHART …] DIR`, and its two charts of any quantity."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import typer

from deepstack.cli import options as opt
from deepstack.cli.completion import complete_chart_or_folder
from deepstack.cli.progress import show_work
from deepstack.errors import BrokenChartError, ConfigError

# Charts of any quantity: the options that each needs, those that it accepts, and an example.
WORDED = {
    "metric": (("x", "y"), ("x", "y", "by"), "--x depth --y val_loss --by scheme"),
    "map": (("x", "y", "value"), ("x", "y", "value"), "--x depth --y lr --value val_loss"),
}
axis, look, files = (
    partial(opt.option, panel=heading)
    for heading in ("The charts metric and map", "Appearance", "Files")
)


def plot_command(
    words: list[str] = typer.Argument(
        ["results"],
        metavar="CHART|DIR",
        help="Charts to draw (default: all), then one folder, or several with --to. "
        "`metric` and `map` draw any quantity.",
        autocompletion=complete_chart_or_folder,
    ),
    at_step: opt.AtStep = None,
    diagnostic: opt.Diagnostic = None,
    where: opt.Where = [],
    sort: opt.Sort = None,
    last: opt.Last = None,
    best: opt.Best = [],
    to: Path | None = files("Folder for the figures (default: figures/ in each study)."),
    x: str | None = axis(
        "metric, map: a setting, or for metric step, layer or a column.", metavar="KEY"
    ),
    y: str | None = axis(
        "metric: a logged column (val_loss, model_update, …) or a per-layer diagnostic; "
        "map: a setting.",
        metavar="COLUMN|KEY",
    ),
    by: str | None = axis("metric: the setting of the lines.", metavar="KEY"),
    value: str | None = axis("map: the column or diagnostic to show.", metavar="COLUMN"),
    layers: str | None = axis(
        "metric, map: mean (default), max, min, last or growth (rate per layer) of the "
        "layers, or one's number."
    ),
    schemes: str | None = look("Only these schemes, in this order.", metavar="A,B"),
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
    formats: str = files(
        "Files to write: pdf, png, svg, csv.", "--format", default="pdf,png,svg,csv", metavar="A,B"
    ),
    plugin: opt.Plugins = [],
) -> None:
    """Draw charts of the runs in a folder, each as PDF, PNG, SVG and a CSV of the drawn values."""
    opt.load_plugins(plugin)
    from deepstack.plots import CHARTS, plot

    if not Path(words[0]).exists():  # charts may be joined by commas
        words = [*words[0].split(","), *words[1:]]
    known = [word for word in words if word in CHARTS or word in WORDED]
    charts = list(takewhile(lambda word: word in known or not Path(word).is_dir(), words[:-1]))
    directories = words[len(charts) :]
    if directories[-1] in known and not Path(directories[-1]).is_dir():
        folders = [word for word in words if word not in known]
        command = shlex.join(["deepstack", "plot", *known, *(folders or ["results/"])])
        problem = "the folder comes last" if folders else "no folder given"
        raise ConfigError(f"plot: {problem}; try: {command}")
    axes = {"x": x, "y": y, "by": by, "value": value}
    more = axis_options(charts, axes, layers)
    paths: Any = ()
    try:
        with show_work("drawing charts") as work:
            paths = plot(
                directories if len(directories) > 1 else directories[0],
                charts or None,
                out=to,
                at_step=at_step,
                diagnostic=diagnostic,
                say=work.note,
                schemes=tuple(filter(None, (schemes or "").split(","))),
                panels=panels,
                smooth=smooth,
                x_scale=x_scale,
                y_scale=y_scale,
                style=style,
                width=width,
                font=font,
                formats=formats,
                **more,
                where=where,
                sort=sort,
                last=last,
                best=best,
            )
    except BrokenChartError as error:
        paths = error.written
        raise
    finally:
        for path in paths:
            typer.echo(path)


def axis_options(
    charts: Sequence[str], axes: dict[str, str | None], layers: str | None
) -> dict[str, Any]:
    """Return the options of `metric` or `map`.  Raises ConfigError for missing and extra ones."""
    chosen = {name: word for name, word in axes.items() if word is not None}
    name = next((chart for chart in charts if chart in WORDED), None)
    if name is None:
        if chosen:
            raise ConfigError(f"plot: --{next(iter(chosen))} belongs to the charts metric and map")
        return {}
    needed, accepted, example = WORDED[name]
    problems = [f"needs --{option}" for option in needed if option not in chosen]
    problems += [f"has no --{option}" for option in chosen if option not in accepted]
    problems += ["is drawn alone"] if len(charts) > 1 else []
    if problems:
        raise ConfigError(
            f"plot {name}: {' and '.join(problems)}; as in: deepstack plot {name} DIR {example}"
        )
    return chosen | {"layers": layers}
