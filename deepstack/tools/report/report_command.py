"""The command `deepstack report DIR…`."""

import sys
from pathlib import Path
from typing import Any

import typer

from deepstack.base import BrokenChartError, ConfigError
from deepstack.cli import command, is_interactive, show_work
from deepstack.cli import options as opt

PORT = 8765


@command("Tools", "deepstack report results/")
def report_command(
    directories: opt.Folders = ["results"],
    to: Path | None = opt.option(
        "File to write (default: report.html or report.tex in the folder)."
    ),
    against: opt.Against = None,
    best: opt.Best = [],
    where: opt.Where = [],
    sort: opt.Sort = None,
    last: opt.Last = None,
    at_step: opt.AtStep = None,
    diagnostic: opt.Diagnostic = None,
    latex: bool = opt.flag(
        "Write the tables as LaTeX, report.tex, instead of the page.", "--latex"
    ),
    serve: bool = opt.flag(
        "Show the page on 127.0.0.1 instead, where it follows running sweeps; Ctrl-C ends it.",
        "--serve",
    ),
    port: int | None = opt.option(
        f"With --serve: its port; 0: a free one (default: {PORT}).", min=0, max=65535
    ),
    quiet: opt.Quiet = False,
    plugin: opt.Plugins = [],
) -> None:
    """Write one HTML file with the tables, every chart, the settings and their sources.

    The page of --serve can only be read.  It has the tables at once and each chart when it is
    drawn.  From another machine: ssh -L 8765:127.0.0.1:8765 HOST, then open the printed address.
    """
    if port is not None and not serve:
        raise ConfigError("--port: found without --serve, which it needs")
    if serve and (to is not None or latex):
        raise ConfigError("--serve: found --to or --latex, which write a file; leave them out")
    opt.load_plugins(plugin)
    selection: dict[str, Any] = {"where": where, "sort": sort, "last": last}
    if serve:
        from deepstack.tools.report.server import serve as serve_page

        charts: dict[str, Any] = {"at_step": at_step, "diagnostic": diagnostic}
        port = PORT if port is None else port
        serve_page(directories, port, quiet, against=against, best=best, **charts, **selection)
        return
    if latex:
        for name, value in (("at-step", at_step), ("diagnostic", diagnostic)):
            if value is not None:
                raise ConfigError(f"--{name} is for charts, which --latex leaves out; omit it")
        from deepstack.tools.report.tables import report_tables

        with show_work("reading runs", quiet) as work:
            say = (lambda line: None) if quiet else work.note
            path = report_tables(directories, to, against, best, say, **selection)
        typer.echo(path)
        return
    from deepstack.tools.report.page import report as write_report

    try:
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
