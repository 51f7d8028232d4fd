"""The command `deepstack rerun RUN [--check]`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from deepstack.cli import options as opt
from deepstack.cli.signals import stop_on_signal
from deepstack.errors import DifferenceError
from deepstack.records import Run, existing_run

if TYPE_CHECKING:
    from deepstack.training.rerun import Comparison

ALSO = 4  # number of further places that a difference names


def rerun_command(
    run: opt.RunPath,
    check: bool = opt.flag(
        "Keep nothing; compare with the record; exit 6 on a difference.", "--check"
    ),
    out: opt.Out = Path("results"),
    plugin: opt.Plugins = [],
    quiet: opt.Quiet = False,
    allow_env_change: opt.AllowEnvChange = False,
) -> None:
    """Train a run again from its record, into <study>-rerun, and print the new folder.

    --check trains in a temporary folder and stops at the first value that differs from the record.
    A run that has not ended is compared up to its last step.
    """
    existing_run(run)
    opt.load_plugins(plugin)
    from deepstack.cli.display import observe
    from deepstack.training import train
    from deepstack.training.rerun import check as compare_with_record
    from deepstack.training.rerun import recorded_config

    with (
        opt.located(run / "config.yaml", []),
        observe(quiet) as observer,
        stop_on_signal() as stop,
    ):
        if not check:
            record = Run(run)
            config, _ = recorded_config(record.folder, allow_env_change)
            repeated = train(
                config,
                study=f"{record.study}-rerun",
                out=out,
                observer=observer,
                stop=stop,
                allow_env_change=allow_env_change,
                command=opt.command_line(),
            )
        else:
            comparison = compare_with_record(
                run, observer=observer, stop=stop, allow_env_change=allow_env_change
            )
    if not check:
        typer.echo(repeated.path)
        return
    if not quiet:
        for line in verdict_notes(comparison):
            opt.note(line)
    if comparison.differences:
        raise DifferenceError(describe_difference(run, comparison))
    amounts = ", ".join(f"{number} {name}" for name, number in comparison.compared.items())
    extent = "" if comparison.upto is None else f" up to step {comparison.upto}"
    typer.echo(f"identical{extent}: {amounts}")


def verdict_notes(comparison: Comparison) -> list[str]:
    """Return notes for the reader of a verdict: damage of the record, changed environment, code."""
    lines = [f"the record itself is damaged: {problem}" for problem in comparison.damage]
    lines += [f"environment: {change}" for change in comparison.changes]
    if comparison.code and comparison.differences:
        lines.append(f"code: commit {comparison.code}")
    return lines


def describe_difference(run: Path, comparison: Comparison) -> str:
    """Describe the first difference with both values, and name further places that differ."""
    first, *others = comparison.differences
    lines = [
        f"{run} is not reproduced: first difference at {first.place}",
        f"  recorded: {first.recorded}",
        f"  now:      {first.now}",
    ]
    if others:
        more = f" and {len(others) - ALSO} more" if len(others) > ALSO else ""
        lines.append(f"  also at {'; '.join(d.place for d in others[:ALSO])}{more}")
    return "\n".join(lines)
