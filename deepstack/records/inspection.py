"""Inspection of a run: compares every file with its checksum, or reads it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
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
from deepstack.records.published import is_published
from deepstack.records.run import find_runs, visible_folders

SIGNS = ("status.json", "meta.json", "steps.csv")


@dataclass
class Inspection:
    """The result of inspecting every file of a run.

    state: of status.json, or 'interrupted' if it is 'running' and no process holds the run.
    files: number of files compared with a sha256.  problems: one line each, naming the file.
    known: whether an ended run has checksums; those of older versions have none.
    weights: False for a run published without its checkpoints.
    """

    folder: RunFolder
    state: str = "unknown"
    files: int = 0
    problems: list[str] = field(default_factory=list)
    known: bool = True
    weights: bool = True

    @contextlib.contextmanager
    def report_unreadable(self, name: str) -> Iterator[None]:
        """Add the problem that a file cannot be read if the block raises an error."""
        try:
            yield
        except (OSError, ValueError, DeepstackError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            self.problems.append(f"{name}: unreadable ({why or error})")

    @property
    def verdict(self) -> str:
        """One of 'damaged', 'no checksums', 'so far' (not ended), 'no weights' and 'whole'.

        'no weights': a published run whose other files are whole.
        """
        if self.problems:
            return "damaged"
        if self.state not in ENDED:
            return "so far"
        if not self.known:
            return "no checksums"
        return "whole" if self.weights else "no weights"


def folders_to_inspect(path: str | os.PathLike[str]) -> list[RunFolder]:
    """Return the runs in a run, study or results folder, also those without a config.yaml.

    Raises NothingMatchedError when there is none.
    """
    root = Path(path)
    children = visible_folders(root)
    below = [root, *children, *(path for study in children for path in visible_folders(study))]
    without_config = {folder for folder in below if _lacks_config(folder)}
    runs: list[RunFolder] = []
    try:
        runs = [run.folder for run in find_runs(root)]
    except NothingMatchedError:
        if not without_config:
            raise
    return runs + [RunFolder(folder) for folder in sorted(without_config)]


def problems(folder: RunFolder) -> list[str]:
    """Return a line for each problem of the files of a run; empty without problems."""
    return inspect(folder).problems


def inspect(folder: RunFolder) -> Inspection:
    """Compare every file of a run with its checksum.

    A run that has ended has checksums.json, and status.json has the sha256 of that.  In any other
    run, checkpoints have checksums of themselves and of the logs up to their step.  Files without a
    checksum are read, and their rows and steps are compared with each other.
    """
    result = Inspection(folder)
    held = folder.holder() is not None
    status = _status(result)
    if result.state == "running" and not held:
        result.state = "interrupted"
    has_sums = (folder.path / CHECKSUMS).exists()
    # In a run that has not ended, checksums were written just before a kill and are outdated.
    if has_sums and (result.state in ENDED or not status):
        _compare_all(result, status)
    else:
        if "checksums" in status:
            result.problems.append(f"{CHECKSUMS}: missing")
        result.known = result.state not in ENDED
        _read_all(result)
        _compare_checkpoints(result, held)
    return result


def _status(result: Inspection) -> dict[str, Any]:
    """Return status.json, set the state, and add contradictions to the problems."""
    folder, say = result.folder, result.problems.append
    row: dict[str, str] = {}
    with contextlib.suppress(DeepstackError):  # reported where the file is read
        row = folder.last_row()
    if not folder.status_path.exists():
        result.state = "interrupted"  # the run was killed before it began
        if (folder.path / CHECKSUMS).exists() or folder.checkpoints() or row:
            say(f"{STATUS}: missing")
        return {}
    status = None
    with result.report_unreadable(STATUS):
        status = mapping(folder.status_path)
    if status is None:
        return {}
    state, step = status.get("state"), status.get("step")
    if state not in STATES:
        say(f"{STATUS}: found state {state!r}; allowed {', '.join(STATES)}")
        return status
    result.state = str(state)
    if not isinstance(step, int) or isinstance(step, bool) or "error" not in status:
        say(f"{STATUS}: state, step and error are not all there")
        return status
    last = int(row.get("step", "0"))
    reaches_step = False
    with contextlib.suppress(DeepstackError):
        reaches_step = folder.ends_at(step)
    if state in ENDED and not reaches_step:
        say(f"{STATUS}: {state} at step {step}, but the last row of steps.csv is step {last}")
    elif state in ("running", "interrupted") and step > last:
        say(f"{STATUS}: saved at step {step}, but the last row of steps.csv is step {last}")
    if state == "done" and status["error"] is not None:
        say(f"{STATUS}: done, with the error {status['error']!r}")
    if state == "diverged" and not _has_value(row, status.get("quantity"), status.get("value")):
        say(
            f"{STATUS}: diverged with {status.get('quantity')} = {status.get('value')}, "
            "which is not in the last row of steps.csv"
        )
    return status


def _compare_all(result: Inspection, status: dict[str, Any]) -> None:
    """Compare every data file with checksums.json, and that with its sha256 in status.json."""
    folder, say = result.folder, result.problems.append
    sums = None
    with result.report_unreadable(CHECKSUMS):
        if status and "checksums" not in status:
            say(f"{STATUS}: has no sha256 of {CHECKSUMS}")
        elif status and sha256(plain_file(folder.path / CHECKSUMS)) != status["checksums"]:
            say(f"{CHECKSUMS}: changed (its sha256 is not the one in status.json)")
        sums = mapping(folder.path / CHECKSUMS)
    if sums is None:
        return
    there = data_files(folder)
    wanted = sums.pop(STATUS, None)  # older versions have none
    if status and wanted not in (None, status_sum(status)):
        say(f"{STATUS}: changed (sha256 differs)")
    result.weights = not is_published(folder.path) or folder.checkpoint_dir.exists()
    for name, wanted in sums.items():
        if not is_data(name):
            say(f"{CHECKSUMS}: names {name!r}, which is no file of a run")
        elif name.startswith("checkpoint/") and not result.weights:
            continue
        elif name not in there:
            say(f"{name}: missing")
        elif not there[name].is_file():  # reading a pipe would block
            say(f"{name}: unreadable (no file)")
        else:
            result.files += 1
            with result.report_unreadable(name):
                if sha256(there[name]) != wanted:
                    say(f"{name}: changed (sha256 differs)")
    # A run killed before it removed its checkpoints still has them, whole and unlisted.
    listed = {str(PurePosixPath(name).parent) for name in sums}
    for step in folder.checkpoints():
        if f"checkpoint/{step}" not in listed and (wrong := damage(folder.checkpoint_path(step))):
            say(f"checkpoint/{step}: {wrong}")
    for name in sorted(there.keys() - sums.keys()):
        parent = str(PurePosixPath(name).parent)
        if not parent.startswith("checkpoint/") or parent in listed:
            say(f"{name}: not listed in {CHECKSUMS}")


def _read_all(result: Inspection) -> None:
    """Read the files that have no sha256; add unreadable ones and bad rows to the problems."""
    folder, say = result.folder, result.problems.append
    for path in (folder.meta_path, folder.columns_path):
        with result.report_unreadable(path.name), contextlib.suppress(FileNotFoundError):
            mapping(path)
    if folder.exists():
        with result.report_unreadable("config.yaml"):
            folder.read_config()
    else:
        say("config.yaml: missing")
    for path in sorted((*folder.path.glob("*.csv"), *folder.layers_dir.glob("*.npy"))):
        name = path.relative_to(folder.path).as_posix()
        if path.name.startswith("."):
            continue
        with result.report_unreadable(name):
            if not path.is_file():
                say(f"{name}: unreadable (no file)")
            elif path.suffix == ".csv":
                if wrong := _describe_bad_row(path, torn=result.state not in ENDED):
                    say(f"{name}: {wrong}")
            elif (folder.layers_dir / "steps.npy").exists():
                folder.read_layers(path.stem)
            elif any(last_rows(log)[1] for log in (folder.steps_path, folder.evals_path)):
                # A kill may prevent it only before the first row: it follows the first snapshot.
                say(f"{name}: unreadable (no steps.npy)")


def _compare_checkpoints(result: Inspection, held: bool) -> None:
    """Compare checkpoints with their checksums, and logs with those in the newest whole one."""
    folder = result.folder
    newest: int | None = None
    for step in reversed(folder.checkpoints()):
        path = folder.checkpoint_path(step)
        wrong = damage(path)
        if held and not path.is_dir():  # the process that holds the run has just removed it
            continue
        if wrong:
            result.problems.append(f"checkpoint/{step}: {wrong}")
            continue
        result.files += len(list(path.glob("*")))
        if newest is None:
            newest = step
            _compare_logs(result, step)


def _compare_logs(result: Inspection, step: int) -> None:
    """Compare the logs, up to the step of a checkpoint, with the checksums in it."""
    folder, say = result.folder, result.problems.append
    logs: Any = {}
    name = f"checkpoint/{step}/{STATE}"
    # The process that holds the run may just have removed the checkpoint.
    with result.report_unreadable(name), contextlib.suppress(FileNotFoundError):
        logs = mapping(folder.path / name).get("logs", {})
    if not isinstance(logs, dict):
        say(f"{name}: unreadable (logs is no object)")
        return
    for log_name, wanted in logs.items():
        result.files += 1
        log = folder.log(PurePosixPath(log_name).name, ("step",))
        with result.report_unreadable(log.path.name):
            if not log.path.exists():
                say(f"{log.path.name}: missing")
            elif log.upto(step).sha256 != wanted:
                say(f"{log.path.name}: changed (sha256 up to step {step} differs)")


def _lacks_config(path: Path) -> bool:
    """Return whether a folder looks like a run but has no config.yaml."""
    return not RunFolder(path).exists() and any((path / sign).is_file() for sign in SIGNS)


def _has_value(row: dict[str, str], quantity: object, value: object) -> bool:
    """Return whether a row has this value of this quantity."""
    try:
        return row.get(str(quantity)) == number_text(float(str(value)))
    except ValueError:
        return False


def _describe_bad_row(path: Path, torn: bool) -> str | None:
    """Describe the first malformed row of a CSV file: number of cells, order of steps."""
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
