"""Inspection of a run: compares every file with its checksum, or reads it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from deepstack.errors import DeepstackError, NothingMatchedError
from deepstack.records.analyses import analysis_names
from deepstack.records.append_log import extent, number_text
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
from deepstack.records.run import find_runs, folders_below

SIGNS = ("status.json", "meta.json", "steps.csv")


class Inspection:
    """The result of inspecting every file of a run.

    A run that has ended has checksums.json, and status.json has the sha256 of that.  In any other
    run, checkpoints have checksums of themselves and of the logs up to their step.  Files without a
    checksum are read, and their rows and steps are compared with each other.  An analysis has
    separate checksums.

    state: of status.json, or 'interrupted' if it is 'running' and no process holds the run.
    files: number of files compared with a sha256.  problems: one line each, naming the file.
    known: whether an ended run has checksums; those of older versions have none.
    weights: False for a run published without its checkpoints.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.state = "unknown"
        self.files = 0
        self.problems: list[str] = []
        self.known = True
        self.weights = True
        held = folder.holder() is not None
        status = self._read_status()
        if self.state == "running" and not held:
            self.state = "interrupted"
        self._compare_analyses()
        has_sums = (folder.path / CHECKSUMS).exists()
        # In a run that has not ended, checksums were written just before a kill and are outdated.
        if has_sums and (self.state in ENDED or not status):
            self._compare_all(status)
            return
        if "checksums" in status:
            self._add(CHECKSUMS, "missing")
        self.known = self.state not in ENDED
        self._read_all()
        self._compare_checkpoints(held)

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

    def _add(self, name: str, problem: str) -> None:
        self.problems.append(f"{name}: {problem}")

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Add the problem that a file cannot be read if the block raises an error."""
        try:
            yield
        except (OSError, ValueError, DeepstackError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            self._add(name, f"unreadable ({why or error})")

    def _read_status(self) -> dict[str, Any]:
        """Return status.json, set the state, and add contradictions to the problems."""
        folder = self.folder
        row: dict[str, str] = {}
        with contextlib.suppress(DeepstackError):  # reported where the file is read
            row = folder.last_row()
        last = int(row.get("step", "0"))
        if not folder.status_path.exists():
            self.state = "interrupted"  # the run was killed before it began
            if (folder.path / CHECKSUMS).exists() or folder.checkpoints() or last:
                self._add(STATUS, "missing")
            return {}
        status: dict[str, Any] = {}
        with self._reading(STATUS):
            status = mapping(folder.status_path)
            state, step = status.get("state"), status.get("step")
            if state not in STATES or type(step) is not int:
                allowed = ", ".join(STATES)
                self._add(STATUS, f"found state {state!r} at step {step!r}; allowed {allowed}")
                return status
            self.state = str(state)
            if "error" not in status or (state == "done" and status["error"] is not None):
                self._add(
                    STATUS, f"found {state} with the error {status.get('error', 'missing')!r}"
                )
            reaches_step = step <= last
            if state in ENDED:
                with contextlib.suppress(DeepstackError):
                    reaches_step = folder.ends_at(step)
            if not reaches_step and state in (*ENDED, "running", "interrupted"):
                where = f"{state if state in ENDED else 'saved'} at step {step}"
                self._add(STATUS, f"{where}, but the last row of steps.csv is step {last}")
            quantity, value = status.get("quantity"), str(status.get("value", "nan"))
            if state == "diverged" and row.get(str(quantity)) != number_text(float(value)):
                where = f"diverged with {quantity} = {value}"
                self._add(STATUS, f"{where}, which is not in the last row of steps.csv")
        return status

    def _compare_analyses(self) -> None:
        """Compare every file of every analysis with its sha256."""
        for name in analysis_names(self.folder):
            path, label = self.folder.analysis_dir / name, f"analysis/{name}"
            with self._reading(f"{label}/{CHECKSUMS}"):
                listed = mapping(path / CHECKSUMS)
                sums = {f"{label}/{file}": wanted for file, wanted in listed.items()}
                there = {f"{label}/{file.name}": file for file in path.iterdir()}
                del there[f"{label}/{CHECKSUMS}"]
                self._compare_files(sums, there, links=False)
                for file in sorted(there.keys() - sums.keys()):
                    self._add(file, f"not listed in {CHECKSUMS}")

    def _compare_files(
        self, sums: Mapping[str, Any], there: Mapping[str, Path], links: bool = True
    ) -> None:
        """Compare files, or links to files if these are allowed, with their sha256."""
        for name, wanted in sums.items():
            if name not in there:
                self._add(name, "missing")
            elif there[name].is_symlink() and not links:
                self._add(name, "unreadable (a link)")
            elif not there[name].is_file():  # reading a pipe would block
                self._add(name, "unreadable (no file)")
            else:
                self.files += 1
                with self._reading(name):
                    if sha256(there[name]) != wanted:
                        self._add(name, "changed (sha256 differs)")

    def _compare_all(self, status: dict[str, Any]) -> None:
        """Compare every data file with checksums.json, and that with its sha256 in status.json."""
        folder = self.folder
        sums = None
        with self._reading(CHECKSUMS):
            if status and "checksums" not in status:
                self._add(STATUS, f"has no sha256 of {CHECKSUMS}")
            elif status and sha256(plain_file(folder.path / CHECKSUMS)) != status["checksums"]:
                self._add(CHECKSUMS, "changed (its sha256 is not the one in status.json)")
            sums = mapping(folder.path / CHECKSUMS)
        if sums is None:
            return
        there = data_files(folder)
        wanted = sums.pop(STATUS, None)  # older versions have none
        if status and wanted not in (None, status_sum(status)):
            self._add(STATUS, "changed (sha256 differs)")
        self.weights = not is_published(folder.path) or folder.checkpoint_dir.exists()
        for name in [name for name in sums if not is_data(name)]:
            self._add(CHECKSUMS, f"names {name!r}, which is no file of a run")
            del sums[name]
        if not self.weights:
            sums = {n: s for n, s in sums.items() if not n.startswith("checkpoint/")}
        self._compare_files(sums, there)
        # A run killed before it removed its checkpoints still has them, whole and unlisted.
        listed = {str(PurePosixPath(name).parent) for name in sums}
        for step in folder.checkpoints():
            name = f"checkpoint/{step}"
            if name not in listed and (problem := damage(folder.checkpoint_path(step))):
                self._add(name, problem)
        for name in sorted(there.keys() - sums.keys()):
            parent = str(PurePosixPath(name).parent)
            if not parent.startswith("checkpoint/") or parent in listed:
                self._add(name, f"not listed in {CHECKSUMS}")

    def _read_all(self) -> None:
        """Read files that have no sha256; add unreadable ones and bad rows to the problems."""
        folder = self.folder
        for path in (folder.meta_path, folder.columns_path):
            with self._reading(path.name), contextlib.suppress(FileNotFoundError):
                mapping(path)
        if folder.exists():
            with self._reading("config.yaml"):
                folder.read_config()
        else:
            self._add("config.yaml", "missing")
        for name, path in data_files(folder).items():
            if path.suffix not in (".csv", ".npy"):
                continue
            with self._reading(name):
                if not path.is_file():
                    self._add(name, "unreadable (no file)")
                elif path.suffix == ".csv":
                    if problem := _describe_bad_row(path, torn=self.state not in ENDED):
                        self._add(name, problem)
                elif (folder.layers_dir / "steps.npy").exists():
                    folder.read_layers(path.stem)
                elif any(last_rows(log)[1] for log in (folder.steps_path, folder.evals_path)):
                    # A kill may prevent it only before the first row: it follows the snapshot.
                    self._add(name, "unreadable (no steps.npy)")

    def _compare_checkpoints(self, held: bool) -> None:
        """Compare checkpoints with their checksums, and logs with those in the newest whole one."""
        newest: int | None = None
        for step in reversed(self.folder.checkpoints()):
            path = self.folder.checkpoint_path(step)
            problem = damage(path)
            if held and not path.is_dir():  # the process that holds the run has just removed it
                continue
            if problem:
                self._add(f"checkpoint/{step}", problem)
                continue
            self.files += len(list(path.glob("*")))
            if newest is None:
                newest = step
                self._compare_logs(step)

    def _compare_logs(self, step: int) -> None:
        """Compare the logs, up to the step of a checkpoint, with the checksums in it."""
        logs: Any = {}
        name = f"checkpoint/{step}/{STATE}"
        # The process that holds the run may just have removed the checkpoint.
        with self._reading(name), contextlib.suppress(FileNotFoundError):
            logs = mapping(self.folder.path / name).get("logs", {})
        if not isinstance(logs, dict):
            self._add(name, "unreadable (logs is no object)")
            return
        for log_name, wanted in logs.items():
            self.files += 1
            path = self.folder.csv_path(PurePosixPath(log_name).stem)
            with self._reading(path.name):
                if not path.exists():
                    self._add(path.name, "missing")
                elif extent(path, step).sha256 != wanted:
                    self._add(path.name, f"changed (sha256 up to step {step} differs)")


def folders_to_inspect(path: str | os.PathLike[str]) -> list[RunFolder]:
    """Return the runs in a run, study or results folder, also those without a config.yaml.

    Raises NothingMatchedError when there is none.
    """
    root = Path(path)
    runs: list[RunFolder] = []
    for folder in sorted(folders_below(root)):
        has_files = any((folder / sign).is_file() for sign in SIGNS)
        if has_files and not RunFolder(folder).exists():
            runs.append(RunFolder(folder))
    with contextlib.suppress(*[NothingMatchedError] if runs else []):
        runs = [run.folder for run in find_runs(root)] + runs
    return runs


def inspect(folder: RunFolder) -> Inspection:
    """Compare every file of a run with its checksum."""
    return Inspection(folder)


def problems(folder: RunFolder) -> list[str]:
    """Return a line for each problem of the files of a run; empty without problems."""
    return Inspection(folder).problems


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
