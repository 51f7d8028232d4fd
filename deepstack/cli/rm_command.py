"""The command `deepstack rm DIR…`."""

import sys
from pathlib import Path

import typer

from deepstack.base.errors import ConfigError
from deepstack.cli.commands import command
from deepstack.cli.options import Out, flag
from deepstack.cli.output import log
from deepstack.records.cells import counted, one_line
from deepstack.records.trash import empty_trash, list_trash, to_trash


@command("Results", "deepstack rm results/quick", place=8)
def rm_command(
    directories: list[Path] = typer.Argument(
        [], metavar="DIR", help="Runs or studies below --out."
    ),
    out: Out = Path("results"),
    empty: bool = flag("Delete the contents of .trash for good.", "--empty"),
    yes: bool = flag("With --empty: do not ask on a terminal.", "--yes", "-y"),
) -> None:
    """Move runs or studies into results/.trash and print their new paths.

    Move one back to restore it. Only --empty deletes the trash: it lists the runs first, and asks
    on a terminal.
    """
    if empty == bool(directories):
        count = "both" if empty else "neither"
        raise ConfigError(f"rm: found {count} of DIR and --empty; allowed one of them")
    if empty:
        trashed = list_trash(out)
        for run in trashed:
            log(one_line(str(run)))
        if trashed and not yes and sys.stdin.isatty() and sys.stderr.isatty():
            question = f"delete {counted('{} runs', len(trashed))} for good?"
            if not typer.confirm(question, err=True):
                log("nothing was deleted")
                return
        runs, size = empty_trash(out)
        typer.echo(f"{size / 1e6:,.1f} MB freed, {runs} runs")
        return
    for _, target in to_trash(directories, out):
        typer.echo(one_line(str(target)))
