"""deepstack verify DIR…"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepstack.cli.options import Json
from deepstack.errors import DifferenceError, Interrupted

if TYPE_CHECKING:
    from deepstack.records import Inspection


def register(app: typer.Typer) -> None:
    app.command("verify")(verify)


def verify(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR", help="Runs, studies or results folders.")
    ],
    json: Json = False,
) -> None:
    """Check every data file of every run: is it what was written?  Exit 6 where one is not.

    A run that has ended is compared with its checksums.json; one that has not, with its
    checkpoints.  log.txt is not checked.  Who can write the folder can write another checksum too:
    it is no signature.
    """
    from deepstack.cli.tables import emit
    from deepstack.records import folders_to_inspect, inspect
    from deepstack.records.cells import one_line

    folders = [folder for directory in directories for folder in folders_to_inspect(directory)]
    once = {folder.path.resolve(): folder for folder in folders}
    found: list[Inspection] = []
    try:
        for folder in once.values():
            found.append(one := inspect(folder))
            for problem in one.problems:
                typer.echo(one_line(f"{folder.path}: {problem}"), err=True)
    except KeyboardInterrupt:
        raise Interrupted(
            f"interrupted after {len(found)} of {len(once)} runs", signal.SIGINT
        ) from None
    emit([row(one, json) for one in found], json)
    conclude(found)


def row(one: Inspection, nested: bool) -> dict[str, Any]:
    """A run's row of the table; the JSON says what is wrong as well."""
    path = one.folder.path
    cells = {
        "study": path.resolve().parent.name,
        "run": one.folder.name,
        "state": one.state,
        "files": one.files,
        "verdict": one.verdict,
    }
    return cells | {"path": str(path), "problems": one.problems} if nested else cells


def conclude(found: Sequence[Inspection]) -> None:
    """Count what cannot be compared, and raise DifferenceError where something is wrong."""
    unknown = sum(one.verdict == "no checksums" for one in found)
    if unknown:
        typer.echo(
            f"{unknown} of {len(found)} runs have no checksums: an older version wrote them, and "
            "their files were only read",
            err=True,
        )
    damaged = sum(one.verdict == "damaged" for one in found)
    if damaged:
        raise DifferenceError(f"{damaged} of {len(found)} runs are not as they were written")
