"""Every file of a run looked at: is it what was written?"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from deepstack.errors import DeepstackError, NothingMatchedError
from deepstack.records.append_log import number_text
from deepstack.records.checksums import (
    CHECKSUMS,
    STATE,
    STATUS,
    damage,
    data_files,
    is_data,
    mapping,
    plain_file,
    sha256,
    status_sum,
)
from deepstack.records.files import read
from deepstack.records.folder import ENDED, STATES, RunFolder, last_rows
from deepstack.records.run import find_runs, visible_folders

SIGNS = ("status.json", "meta.json", "steps.csv")


@dataclass
class Inspection:
    """What is found when every file of a run is looked at.

    state: of status.json, or 'interrupted' where nobody works on a run that says 'running'.
    files: number of files compared with a sha256.  problems: one line each, naming the file.
    known: whether there are checksums to compare with, as in every run that has ended, but for
    those of older versions.
    """

    folder: RunFolder
    state: str = "unknown"
    files: int = 0
    problems: list[str] = field(default_factory=list)
    known: bool = True

    @property
    def verdict(self) -> str:
        """'damaged', 'no checksums', 'so far' for a run that has not ended, or 'whole'."""
        if self.problems:
            return "damaged"
        if self.state not in ENDED:
            return "so far"
        return "whole" if self.known else "no checksums"


def folders_to_inspect(path: str | os.PathLike[str]) -> list[RunFolder]:
    """The runs in a run folder, a study or a results folder, those without a config.yaml as well.

    Raises NothingMatchedError when there is none.
    """
    root = Path(path)
    children = visible_folders(root)
    below = [root, *children, *(run for study in children for run in visible_folders(study))]
    beheaded = {child for child in below if _is_beheaded(child)}
    found: list[RunFolder] = []
    try:
        found = [run.folder for run in find_runs(root)]
    except NothingMatchedError:
        if not beheaded:
            raise
    return found + [RunFolder(child) for child in sorted(beheaded)]


def problems(folder: RunFolder) -> list[str]:
    """What is wrong with the files of a run, a line each; empty where nothing is."""
    return inspect(folder).problems


def inspect(folder: RunFolder) -> Inspection:
    """Compare every file of a run with what was written.

    A run that has ended is compared with its checksums.json, and that with status.json.  Another
    one has only what its checkpoints say, of themselves and of the logs up to them.  What has no
    sha256 is read: that it can be, and that rows and steps fit each other.
    """
    found = Inspection(folder)
    held = folder.holder() is not None
    status = _status(found)
    if found.state == "running" and not held:
        found.state = "interrupted"
    has_sums = (folder.path / CHECKSUMS).exists()
    # Beside a status.json of a run that goes on, they were written just before a kill: no use.
    if has_sums and (found.state in ENDED or not status):
        _compare_all(found, status)
    else:
        if "checksums" in status:
            found.problems.append(f"{CHECKSUMS}: missing")
        found.known = found.state not in ENDED
        _read_all(found)
        _compare_checkpoints(found, held)
    return found


def _status(found: Inspection) -> dict[str, Any]:
    """status.json and the state in it; what does not fit together goes to the problems."""
    folder, say = found.folder, found.problems.append
    if not folder.status_path.exists():
        found.state = "interrupted"  # a run killed before it began has none
        if (folder.path / CHECKSUMS).exists() or folder.checkpoints() or _last_row(folder):
            say("status.json: missing")
        return {}
    try:
        status = mapping(folder.status_path)
    except (OSError, ValueError) as error:
        say(f"status.json: unreadable ({error})")
        return {}
    state, step = status.get("state"), status.get("step")
    if state not in STATES:
        say(f"status.json: found state {state!r}; allowed {', '.join(STATES)}")
        return status
    found.state = str(state)
    if not isinstance(step, int) or isinstance(step, bool) or "error" not in status:
        say("status.json: state, step and error are not all there")
        return status
    row = _last_row(folder)
    last = int(row.get("step", "0"))
    if state in ENDED and not _ends_at(folder, step):
        say(f"status.json: {state} at step {step}, but the last row of steps.csv is step {last}")
    elif state in ("running", "interrupted") and step > last:
        say(f"status.json: saved at step {step}, but the last row of steps.csv is step {last}")
    if state == "done" and status["error"] is not None:
        say(f"status.json: done, with the error {status['error']!r}")
    if state == "diverged" and not _is_in(row, status.get("quantity"), status.get("value")):
        say(
            f"status.json: diverged with {status.get('quantity')} = {status.get('value')}, "
            "which is not in the last row of steps.csv"
        )
    return status


def _compare_all(found: Inspection, status: dict[str, Any]) -> None:
    """Every data file against checksums.json, and that against its sha256 in status.json."""
    folder, say = found.folder, found.problems.append
    try:
        if status and "checksums" not in status:
            say(f"status.json: has no sha256 of {CHECKSUMS}")
        elif status and sha256(plain_file(folder.path / CHECKSUMS)) != status["checksums"]:
            say(f"{CHECKSUMS}: changed (its sha256 is not the one in status.json)")
        sums = mapping(folder.path / CHECKSUMS)
    except (OSError, ValueError) as error:
        say(f"{CHECKSUMS}: unreadable ({error})")
        return
    there = data_files(folder)
    wanted = sums.pop(STATUS, None)  # older versions have none
    if status and wanted not in (None, status_sum(status)):
        say(f"{STATUS}: changed (sha256 differs)")
    for name, wanted in sums.items():
        if not is_data(name):
            say(f"{CHECKSUMS}: names {name!r}, which is no file of a run")
        elif name not in there:
            say(f"{name}: missing")
        elif not there[name].is_file():  # a link to a file is one; a pipe would be waited for
            say(f"{name}: unreadable (no file)")
        else:
            found.files += 1
            try:
                if sha256(there[name]) != wanted:
                    say(f"{name}: changed (sha256 differs)")
            except OSError as error:
                say(f"{name}: unreadable ({error.strerror or error})")
    # A kill between the end of a run and the removal of its checkpoints leaves whole ones there.
    kept = {str(PurePosixPath(name).parent) for name in sums}
    for step in folder.checkpoints():
        if f"checkpoint/{step}" not in kept and (wrong := damage(folder.checkpoint_path(step))):
            say(f"checkpoint/{step}: {wrong}")
    for name in sorted(there.keys() - sums.keys()):
        parent = str(PurePosixPath(name).parent)
        if not parent.startswith("checkpoint/") or parent in kept:
            say(f"{name}: not listed in {CHECKSUMS}")


def _read_all(found: Inspection) -> None:
    """Whether files that have no sha256 can be read, and rows follow each other."""
    folder, say = found.folder, found.problems.append
    for path in (folder.meta_path, folder.columns_path):
        if path.exists():
            try:
                mapping(path)
            except (OSError, ValueError) as error:
                say(f"{path.name}: unreadable ({error})")
    if folder.exists():
        try:
            folder.read_config()
        except DeepstackError as error:
            say(f"config.yaml: unreadable ({error})")
    else:
        say("config.yaml: missing")
    for path in sorted((*folder.path.glob("*.csv"), *folder.layers_dir.glob("*.npy"))):
        name = path.relative_to(folder.path).as_posix()
        try:
            if path.name.startswith("."):
                continue
            if not path.is_file():
                say(f"{name}: unreadable (no file)")
            elif path.suffix == ".npy":
                folder.read_layers(path.stem)
            elif wrong := _rows_wrong(path, torn=found.state not in ENDED):
                say(f"{name}: {wrong}")
        except KeyError:
            # of the first look, before any row, the steps come last: a kill may be ahead of them
            with contextlib.suppress(DeepstackError):  # said of the log itself
                if any(last_rows(log)[1] for log in (folder.steps_path, folder.evals_path)):
                    say(f"{name}: unreadable (no steps.npy)")
        except (OSError, DeepstackError) as error:
            say(f"{name}: unreadable ({error})")


def _compare_checkpoints(found: Inspection, held: bool) -> None:
    """Each checkpoint against its own checksums, the logs against those of the newest whole one."""
    folder = found.folder
    newest: int | None = None
    for step in reversed(folder.checkpoints()):
        path = folder.checkpoint_path(step)
        wrong = damage(path)
        if held and not path.is_dir():  # its holder has removed it just now
            continue
        if wrong:
            found.problems.append(f"checkpoint/{step}: {wrong}")
            continue
        found.files += len(list(path.glob("*")))
        if newest is None:
            newest = step
            _compare_logs(found, step)


def _compare_logs(found: Inspection, step: int) -> None:
    """The logs, up to its step, against what a whole checkpoint remembers of them."""
    folder, say = found.folder, found.problems.append
    try:
        logs = mapping(folder.checkpoint_path(step) / STATE).get("logs", {})
        for name, wanted in logs.items():
            found.files += 1
            log = folder.log(PurePosixPath(name).name, ("step",))
            if not log.path.exists():
                say(f"{log.path.name}: missing")
            elif log.sha256_upto(step) != wanted:
                say(f"{log.path.name}: changed (sha256 up to step {step} differs)")
    except FileNotFoundError:
        return  # it was whole a moment ago: who works on the run has removed it
    except (OSError, ValueError, AttributeError, DeepstackError) as error:
        say(f"checkpoint/{step}/{STATE}: unreadable ({error})")


def _is_beheaded(path: Path) -> bool:
    """Whether a folder looks like a run whose config.yaml is gone."""
    return not RunFolder(path).exists() and any((path / sign).is_file() for sign in SIGNS)


def _last_row(folder: RunFolder) -> dict[str, str]:
    """The cells of the last complete row of steps.csv; empty where there is none."""
    try:
        return folder.last_row()
    except DeepstackError:  # why is said where the file is read
        return {}


def _ends_at(folder: RunFolder, step: int) -> bool:
    try:
        return folder.ends_at(step)
    except DeepstackError:
        return False


def _is_in(row: dict[str, str], quantity: object, value: object) -> bool:
    """Whether a row has this value of this quantity."""
    try:
        return row.get(str(quantity)) == number_text(float(str(value)))
    except ValueError:
        return False


def _rows_wrong(path: Path, torn: bool) -> str | None:
    """What is wrong with the form of a CSV file: cells in each row, steps that rise."""
    data = read(path) or b""
    lines = data[: data.rfind(b"\n") + 1].decode("ascii", "replace").splitlines()
    if not torn and not data.endswith(b"\n"):
        return "the last row is torn"
    before = -1
    for number, line in enumerate(lines[1:], start=2):
        first = line.split(",")[0]
        if line.count(",") != lines[0].count(",") or not first.isdecimal():
            return f"line {number} is no row of this table"
        if int(first) <= before and path.name != "timing.csv":  # a resumed run times steps again
            return f"line {number}: step {first} after step {before}"
        before = int(first)
    return None
