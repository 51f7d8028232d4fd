"""The command `deepstack verify DIR…`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepstack.cli.options import Folders, Json, note
from deepstack.cli.progress import show_work
from deepstack.errors import DifferenceError

if TYPE_CHECKING:
    from deepstack.records import Inspection


def verify_command(
    directories: Folders,
    json: Json = False,
) -> None:
    """Compare every data file of every run with its checksum; exit 6 on a difference.

    An ended run is compared with its checksums.json, any other with its checkpoints. log.txt is not
    checked. A checksum is no signature: anyone who can write the folder can change it too.
    """
    from deepstack.cli.tables import emit
    from deepstack.records import folders_to_inspect, inspect
    from deepstack.records.cells import one_line

    folders = [
        folder for directory in directories for folder in folders_to_inspect(Path(directory))
    ]
    once = {folder.path.resolve(): folder for folder in folders}
    inspections: list[Inspection] = []
    with show_work("comparing checksums") as work:
        for folder in once.values():
            work.step(f"comparing checksums: {folder.name}", len(once))
            inspections.append(one := inspect(folder))
            for problem in one.problems:
                work.note(one_line(f"{folder.path}: {problem}"))
    emit([row(one, json) for one in inspections], json)
    conclude(inspections)


def row(one: Inspection, nested: bool) -> dict[str, Any]:
    """Return a run's row of the table; the JSON also lists the problems."""
    path = one.folder.path
    cells = {
        "study": path.resolve().parent.name,
        "run": one.folder.name,
        "state": one.state,
        "files": one.files,
        "verdict": one.verdict,
    }
    return cells | {"path": str(path), "problems": one.problems} if nested else cells


def conclude(inspections: Sequence[Inspection]) -> None:
    """Print the number of runs without checksums; raise DifferenceError if any is damaged."""
    unknown = sum(one.verdict == "no checksums" for one in inspections)
    if unknown:
        note(
            f"{unknown} of {len(inspections)} runs have no checksums: an older version wrote them, "
            "and their files were only read"
        )
    damaged = sum(one.verdict == "damaged" for one in inspections)
    if damaged:
        raise DifferenceError(
            f"{damaged} of {len(inspections)} runs differ from the files that were written"
        )
