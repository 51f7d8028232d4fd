"""The command `deepstack ls DIR`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from deepstack.base.errors import ConfigError, ResourceError
from deepstack.base.text import one_line
from deepstack.cli.commands import command
from deepstack.cli.options import Best, Json, Last, Sort, Where, flag
from deepstack.cli.output import emit, log
from deepstack.records import ENDED

if TYPE_CHECKING:
    from deepstack.records import Run

# A narrow terminal drops these columns first: the run's name has them, or few people need them.
MOST_COMMANDS = 5
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
    watch: bool = flag("Show them while any process trains them; Ctrl-C ends it.", "--watch"),
) -> None:
    """List runs: state, outcome, varying settings, last values.

    Below the table: reasons of failures, and the commands that continue interrupted runs.

    Without a terminal, --watch prints a line for each change of state, and counts twice a minute.
    """
    from deepstack.runs import Runs

    def find() -> Runs:
        return Runs.below(directory).select(where, sort, last, best)

    if watch:
        if json:
            raise ConfigError("--watch: found --json, which prints once; leave one of them out")
        from deepstack.cli.run_watcher import watch as watch_runs

        watch_runs(find, directory)
        return
    runs = find()
    rows = [
        before_settings(row, outcome_of(run, one.state, json))
        for run, one, row in zip(runs, runs.summaries, runs.rows, strict=True)
    ]
    several = len({row["study"] for row in rows}) > 1
    first = [
        "run",
        "state",
        "outcome",
        *(["study"] if several else []),
        "tags",
        "model_update",
        "loss",
    ]
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
    states = zip(runs, runs.summaries, strict=True)
    log_continuation([run for run, one in states if one.state == "interrupted"])


def outcome_of(run: Run, state: str, as_value: bool) -> str | None:
    """Return the outcome of a run in words: 'learnt'; None for a run that has none.

    as_value: whether it is the value that files have: 'trained'.
    """
    from deepstack.runs.outcomes import OUTCOME_WORDS, outcome

    with suppress(ResourceError):  # of a damaged run
        if state in ENDED and (value := outcome(run)):
            return value if as_value else OUTCOME_WORDS[value]
    return None


def before_settings(row: dict[str, Any], outcome: str | None) -> dict[str, Any]:
    """Return a row of the table of runs with the outcome after the state."""
    names = list(row)
    begin = names[: names.index("state") + 1]
    return {name: row[name] for name in begin} | {"outcome": outcome} | row


def log_continuation(runs: Sequence[Run]) -> None:
    """Print the commands that continue interrupted runs."""
    from deepstack.runs.commands import repeat_commands

    commands = repeat_commands(runs)
    for text in commands[:MOST_COMMANDS]:
        log(f"to continue what was interrupted: {text}")
    if len(commands) > MOST_COMMANDS:
        log(f"and {len(commands) - MOST_COMMANDS} more commands; --where KEY=VALUE chooses runs")
