"""deepstack rm DIR…"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepstack.cli.options import Out
from deepstack.errors import ConfigError


def register(app: typer.Typer) -> None:
    app.command("rm")(rm)


def rm(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Runs or studies below --out.")
    ] = [],
    out: Out = Path("results"),
    empty: Annotated[
        bool, typer.Option("--empty", help="Delete what lies in .trash, for good.")
    ] = False,
) -> None:
    """Move runs or studies into results/.trash and print where; nothing is deleted.

    Moving one back brings it back.  --empty deletes the trash, and nothing else ever does.
    """
    from deepstack.records.cells import one_line
    from deepstack.records.trash import empty_trash, to_trash

    if empty == bool(directories):
        found = "both" if empty else "neither"
        raise ConfigError(f"rm: found {found} of DIR and --empty; allowed one of them")
    if empty:
        runs, size = empty_trash(out)
        typer.echo(f"{size / 1e6:,.1f} MB freed, {runs} runs")
        return
    for _, target in to_trash(directories, out):
        typer.echo(one_line(str(target)))
