"""deepstack ls DIR"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepstack.cli.options import Json

# What a run's name says already, and what fewer people ask for, leaves a narrow terminal first.
LAST = ("model.scheme", "model.depth", "seed", "step", "grad_norm", "val_loss_masked", "step_ms")


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
    first = ["run", "state", *(["study"] if table["study"].nunique() > 1 else [])]
    first += [
        "model_update",
        "loss",
        *(str(name) for name in table if name not in (*LAST, "study")),
    ]
    emit(table.to_dict("records"), json, first=first)
