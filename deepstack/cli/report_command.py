"""The command `deepstack report DIR…`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepstack.cli import options as opt
from deepstack.errors import BrokenChartError


def report_command(
    directories: opt.Folders = ["results"],
    to: Annotated[
        Path | None,
        typer.Option("--to", help="File to write (default: report.html in the folder)."),
    ] = None,
    against: opt.Against = None,
    best: opt.Best = [],
    at_step: opt.AtStep = None,
    diagnostic: opt.Diagnostic = None,
    quiet: opt.Quiet = False,
    plugin: opt.Plugins = [],
) -> None:
    """Write one HTML file with the tables, every chart, the settings and their sources."""
    opt.load_plugins(plugin)
    from deepstack.reports import report as write_report

    say = (lambda line: None) if quiet else opt.note
    try:
        path = write_report(directories, to, against, best, at_step, diagnostic, say)
    except BrokenChartError as error:
        typer.echo(error.written[0])
        raise
    typer.echo(path)
