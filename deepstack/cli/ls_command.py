"""The command `deepstack ls DIR`."""

from pathlib import Path

import typer

from deepstack.base.text import one_line
from deepstack.cli.commands import command
from deepstack.cli.options import Best, Json, Last, Sort, Where
from deepstack.cli.output import emit, log

# A narrow terminal drops these columns first: the run's name has them, or few people need them.
LAST = ("model.scheme", "model.depth", "seed", "step", "grad_norm", "val_loss_masked", "step_ms")


@command("Results", "deepstack ls results/depth_sweep", place=3)
def ls_command(
    directory: Path = typer.Argument(
        Path("results"), metavar="DIR", help="A results folder, a study or a run."
    ),
    where: Where = [],
    sort: Sort = None,
    last: Last = None,
    best: Best = [],
    json: Json = False,
) -> None:
    """List runs: state, varying settings, last loss and model update, and reasons of failures."""
    from deepstack.runs import Runs

    runs = Runs.below(directory).select(where, sort, last, best)
    rows = runs.rows
    several = len({row["study"] for row in rows}) > 1
    first = ["run", "state", *(["study"] if several else []), "tags", "model_update", "loss"]
    first += [name for name in rows[0] if name not in (*LAST, "study")]
    losses = ("val_loss_masked", "val_loss", "loss")
    answer = ["state", *[name for name in losses if any(row[name] is not None for row in rows)][:1]]
    emit(rows, json, answer=answer, first=first)
    for run, one in zip(runs, runs.summaries, strict=True):
        name = one_line(one.path.name)
        if one.damage is not None:
            log(f"run {name} is damaged: {one_line(one.damage)}")
        elif one.state in ("failed", "out_of_memory"):
            why = " ".join(str(run.status.get("error")).split())
            phase = f" in {run.status['phase']}" if "phase" in run.status else ""
            log(f"run {name}: {one.state}{phase}: {why}")
