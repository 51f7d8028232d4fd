"""The command `deepstack rm DIR…`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepstack.cli.options import Out
from deepstack.errors import ConfigError


def rm_command(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Runs or studies below --out.")
    ] = [],
    out: Out = Path("results"),
    empty: Annotated[
        bool, typer.Option("--empty", help="Delete the contents of .trash for good.")
    ] = False,
) -> None:
    """Move runs or studies into results/.trash and print their new paths.

    Move one back to restore it. Only --empty deletes the trash.
    """
    from deepstack.records.cells import one_line
    from deepstack.records.trash import empty_trash, to_trash

    if empty == bool(directories):
        count = "both" if empty else "neither"
        raise ConfigError(f"rm: found {count} of DIR and --empty; allowed one of them")
    if empty:
        runs, size = empty_trash(out)
        typer.echo(f"{size / 1e6:,.1f} MB freed, {runs} runs")
        return
    for _, target in to_trash(directories, out):
        typer.echo(one_line(str(target)))
