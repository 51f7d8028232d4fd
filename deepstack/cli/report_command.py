"""The command `deepstack report DIR…`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepstack.cli.options import Plugins, Quiet, load_plugins
from deepstack.errors import BrokenChartError


def report_command(
    directories: Annotated[
        list[str],
        typer.Argument(metavar="DIR", help="Results folders, studies or runs."),
    ] = ["results"],
    to: Annotated[
        Path | None,
        typer.Option("--to", help="File to write (default: report.html in the folder)."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="KEY=VALUE", help="Baseline of the tables, as for `compare`."),
    ] = None,
    best: Annotated[
        list[str],
        typer.Option(metavar="KEY", help="Use only the best value of KEY, as for `compare`."),
    ] = [],
    at_step: Annotated[int | None, typer.Option("--at-step", min=1, help="As for `plot`.")] = None,
    diagnostic: Annotated[str | None, typer.Option(help="As for `plot`.")] = None,
    quiet: Quiet = False,
    plugin: Plugins = [],
) -> None:
    """Write one HTML file with the tables, every chart, the settings and their sources."""
    load_plugins(plugin)
    from deepstack.reports import report as write_report

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    try:
        path = write_report(directories, to, against, best, at_step, diagnostic, say)
    except BrokenChartError as error:
        typer.echo(error.written[0])
        raise
    typer.echo(path)
