"""The command `deepstack plot [CHART …] DIR`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from deepstack.cli.options import AtStep, Diagnostic, Plugins, load_plugins, note
from deepstack.errors import BrokenChartError, ConfigError


def plot_command(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CHART|DIR",
            help="Charts to draw (default: all), then one folder, or several with --to.",
        ),
    ],
    at_step: AtStep = None,
    diagnostic: Diagnostic = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Folder for the figures (default: figures/ in each study)."),
    ] = None,
    plugin: Plugins = [],
) -> None:
    """Draw charts of the runs in a folder, each as PNG, SVG and a CSV of the drawn values."""
    load_plugins(plugin)
    from deepstack.plots import CHARTS, draw

    charts = list(takewhile(lambda word: word in CHARTS or not Path(word).is_dir(), words[:-1]))
    directories = words[len(charts) :]
    directory = directories[-1]
    if not Path(directory).is_dir() and directory in CHARTS:
        folders = [word for word in words if word not in CHARTS]
        charts_named = [word for word in words if word in CHARTS]
        command = shlex.join(["deepstack", "plot", *charts_named, *(folders or ["results/"])])
        problem = "the folder comes last" if folders else "no folder given"
        raise ConfigError(f"plot: {problem}; try: {command}")
    paths: Sequence[Path] = ()
    try:
        paths = draw(
            directories if len(directories) > 1 else directory,
            charts or None,
            out=to,
            at_step=at_step,
            diagnostic=diagnostic,
            say=note,
        )
    except BrokenChartError as error:
        paths = error.written
        raise
    finally:
        for path in paths:
            typer.echo(path)
