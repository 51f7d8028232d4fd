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
        Path, typer.Argument(metavar="DIR", help="A results folder, a study or a run.")
    ] = Path("results"),
    json: Json = False,
) -> None:
    """List runs: state, what varies among them, last loss and model update; why some failed."""
    from deepstack.cli.tables import emit
    from deepstack.records import find_runs, run_rows

    runs = find_runs(directory)
    rows = run_rows(runs)
    several = len({row["study"] for row in rows}) > 1
    first = ["run", "state", *(["study"] if several else []), "model_update", "loss"]
    first += [name for name in rows[0] if name not in (*LAST, "study")]
    emit(rows, json, first=first)
    for run, row in zip(runs, rows, strict=True):
        if row["state"] == "damaged":
            typer.echo(f"run {run.name} is damaged: {run.damage()}", err=True)
        elif row["state"] in ("failed", "out_of_memory"):
            why = " ".join(str(run.status.get("error")).split())
            where = f" in {run.status['phase']}" if "phase" in run.status else ""
            typer.echo(f"run {run.name}: {row['state']}{where}: {why}", err=True)
