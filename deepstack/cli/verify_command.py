"""The command `deepstack verify DIR…`."""

from deepstack.base.errors import DifferenceError
from deepstack.base.text import one_line
from deepstack.cli.commands import command
from deepstack.cli.options import Folders, Json
from deepstack.cli.output import emit, log, show_work
from deepstack.records import Inspection, folders_to_inspect
from deepstack.records.folder import absolute


@command("Results", "deepstack verify results/", place=6)
def verify_command(
    directories: Folders,
    json: Json = False,
) -> None:
    """Compare every data file of every run with its checksum; exit 6 on a difference.

    An ended run is compared with its checksums.json, any other with its checkpoints. log.txt is not
    checked. A checksum is not a signature: anyone who can write the folder can change it too.
    """
    once = {
        folder.path.resolve(): folder
        for directory in directories
        for folder in folders_to_inspect(directory)
    }
    inspections: list[Inspection] = []
    with show_work("comparing checksums") as work:
        for folder in once.values():
            work.step(f"comparing checksums: {folder.name}", len(once))
            inspections.append(one := Inspection(folder))
            for problem in one.problems:
                work.note(one_line(f"{folder.path}: {problem}"))
    rows = [
        {
            "study": absolute(one.folder.path).parent.name,
            "run": one.folder.name,
            "state": one.state,
            "files": one.files,
            "verdict": one.verdict,
        }
        | ({"path": str(one.folder.path), "problems": one.problems} if json else {})
        for one in inspections
    ]
    emit(rows, json)
    if unknown := sum(one.verdict == "no checksums" for one in inspections):
        log(
            f"{unknown} of {len(inspections)} runs have no checksums: an earlier version wrote "
            "them, and their files were only read"
        )
    if damaged := sum(one.verdict == "damaged" for one in inspections):
        raise DifferenceError(
            f"{damaged} of {len(inspections)} runs differ from the files that were written"
        )
