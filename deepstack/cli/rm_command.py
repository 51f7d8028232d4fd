"""The command `deepstack rm DIR…`."""

import sys
from pathlib import Path

import typer

from deepstack.base.errors import ConfigError
from deepstack.base.text import counted, one_line
from deepstack.cli.commands import command
from deepstack.cli.options import Out, flag
from deepstack.cli.output import log
from deepstack.records.removal import plan_removals, remove


@command("Results", "deepstack rm results/quick", place=7)
def rm_command(
    directories: list[Path] = typer.Argument(metavar="DIR", help="Runs or studies below --out."),
    out: Out = Path("results"),
    yes: bool = flag("Do not ask; required without a terminal.", "--yes", "-y"),
) -> None:
    """Delete runs or studies: list their names and sizes, ask, and delete them for good.

    A run in use and results/published are refused. If the command is interrupted, every run is
    whole or gone; repeat it to delete the rest.
    """
    removals = plan_removals(directories, out)
    for removal in removals:
        for path, size in removal.runs.items():
            log(f"{size / 1e6:10,.1f} MB  {one_line(str(path))}")
        if removal.path not in removal.runs:
            log(f"{removal.size / 1e6:10,.1f} MB  {one_line(str(removal.path))} as a whole")
    runs = sum(len(removal.runs) for removal in removals)
    freed = sum(removal.size for removal in removals)
    total = f"{counted('{} runs', runs)}, {freed / 1e6:,.1f} MB"
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigError(f"rm: there is no terminal to ask on; to delete {total}: add --yes")
        if not typer.confirm(f"delete {total} for good?", err=True):
            log("nothing was deleted")
            return
    for removal in removals:
        remove(removal)
    typer.echo(f"deleted: {total}")
