"""The command `deepstack report DIR…`."""

import sys
from pathlib import Path
from typing import Any

import typer

from deepstack.base.errors import BrokenChartError
from deepstack.cli import options as opt
from deepstack.cli.commands import command
from deepstack.cli.output import is_interactive, show_work


@command("Instruments", "deepstack report results/")
def report_command(
    directories: opt.Folders = ["results"],
    to: Path | None = opt.option("File to write (default: report.html in the folder)."),
    against: opt.Against = None,
    best: opt.Best = [],
    where: opt.Where = [],
    sort: opt.Sort = None,
    last: opt.Last = None,
    at_step: opt.AtStep = None,
    diagnostic: opt.Diagnostic = None,
    quiet: opt.Quiet = False,
    plugin: opt.Plugins = [],
) -> None:
    """Write one HTML file with the tables, every chart, the settings and their sources."""
    opt.load_plugins(plugin)
    from deepstack.instruments.report.page import report as write_report

    try:
        selection: dict[str, Any] = {"where": where, "sort": sort, "last": last}
        with show_work("reading runs", quiet) as work:
            say = (lambda line: None) if quiet else work.note
            started = work.step if is_interactive(sys.stderr) else None
            path = write_report(
                directories, to, against, best, at_step, diagnostic, say, started, **selection
            )
    except BrokenChartError as error:
        typer.echo(error.written[0])
        raise
    typer.echo(path)
