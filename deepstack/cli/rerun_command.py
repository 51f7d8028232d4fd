"""deepstack rerun RUN [--check]"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepstack.cli.options import Out, Plugins, Quiet, load_plugins, located
from deepstack.errors import ConfigError, DifferenceError

if TYPE_CHECKING:
    from deepstack.training.rerun import Comparison

ALSO = 4  # further files that a difference is named in


def register(app: typer.Typer) -> None:
    app.command("rerun")(rerun)


def rerun(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    check: Annotated[
        bool,
        typer.Option("--check", help="Keep nothing; compare with the record, exit 6 if it differs"),
    ] = False,
    out: Out = Path("results"),
    plugin: Plugins = [],
    quiet: Quiet = False,
    allow_env_change: Annotated[
        bool,
        typer.Option(
            "--allow-env-change", help="Though another environment than this made the run."
        ),
    ] = False,
) -> None:
    """Train a run again from its own record, into <study>-rerun, and print the new folder.

    With --check: into a folder that is thrown away, up to the first value that is not the recorded
    one; of a run that has not ended, as far as it goes.
    """
    from deepstack.records import RunFolder, no_run

    if not RunFolder(run).exists():
        raise ConfigError(no_run(run))
    load_plugins(plugin)
    from deepstack.cli.display import observe
    from deepstack.cli.signals import stop_on_signal
    from deepstack.training import rerun as again

    with (
        located(run / "config.yaml", []),
        observe(quiet) as observer,
        stop_on_signal() as stop,
    ):
        if not check:
            made = again.rerun(
                run,
                out=out,
                observer=observer,
                stop=stop,
                allow_env_change=allow_env_change,
                command=shlex.join(["deepstack", *sys.argv[1:]]),
            )
        else:
            found = again.check(
                run, observer=observer, stop=stop, allow_env_change=allow_env_change
            )
    if not check:
        typer.echo(made.path)
        return
    if not quiet:
        for line in circumstances(found):
            typer.echo(line, err=True)
    if found.differences:
        raise DifferenceError(told(run, found))
    amounts = ", ".join(f"{number} {name}" for name, number in found.compared.items())
    asfar = "" if found.upto is None else f" as far as it goes, step {found.upto}"
    typer.echo(f"identical{asfar}: {amounts}")


def circumstances(found: Comparison) -> list[str]:
    """What a reader of the verdict should know: lines on stderr."""
    lines = [f"the record itself is damaged: {problem}" for problem in found.damage]
    lines += [f"environment: {change}" for change in found.changes]
    if found.code and found.differences:
        lines.append(f"code: commit {found.code}")
    return lines


def told(run: Path, found: Comparison) -> str:
    """Where the two part first, with both values, and which other files differ."""
    first, *others = found.differences
    lines = [
        f"{run} does not come out again: first at {first.place}",
        f"  recorded: {first.recorded}",
        f"  now:      {first.now}",
    ]
    if others:
        more = f" and {len(others) - ALSO} more" if len(others) > ALSO else ""
        lines.append(f"  also at {'; '.join(d.place for d in others[:ALSO])}{more}")
    return "\n".join(lines)
