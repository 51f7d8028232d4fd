"""deepstack report DIR…"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepstack.cli.options import Plugins, Quiet, load_plugins
from deepstack.errors import BrokenChartError


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    directories: Annotated[
        list[str],
        typer.Argument(metavar="DIR", help="A results folder, a study, a run, or some."),
    ] = ["results"],
    to: Annotated[
        Path | None, typer.Option("--to", help="The file (default: report.html in the folder).")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="KEY=VALUE", help="A baseline for its tables, as of `compare`."),
    ] = None,
    best: Annotated[
        list[str], typer.Option(metavar="KEY", help="Chosen, not compared, as of `compare`.")
    ] = [],
    at_step: Annotated[int | None, typer.Option("--at-step", min=1, help="As of `plot`.")] = None,
    diagnostic: Annotated[str | None, typer.Option(help="As of `plot`.")] = None,
    quiet: Quiet = False,
    plugin: Plugins = [],
) -> None:
    """Write one HTML file to read and send: tables, every chart, settings, where it is from."""
    load_plugins(plugin)
    from deepstack.reports import report as written

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    try:
        path = written(directories, to, against, best, at_step, diagnostic, say)
    except BrokenChartError as error:
        typer.echo(error.written[0])
        raise
    typer.echo(path)
