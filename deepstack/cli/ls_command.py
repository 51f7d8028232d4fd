"""deepstack ls DIR"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepstack.cli.options import Json


def register(app: typer.Typer) -> None:
    app.command("ls")(ls)


def ls(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="A results folder, a study or a run.")
    ] = Path("results"),
    json: Json = False,
) -> None:
    """List runs: state, what varies among them, last loss and model update."""
    from deepstack.cli.tables import emit
    from deepstack.records import find_runs, runs_table

    table = runs_table(find_runs(directory))
    emit(table.to_dict("records"), json)
