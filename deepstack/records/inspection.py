"""Checksums of a run: written at its end, and compared with every file by `deepstack verify`."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from deepstack.base.errors import DeepstackError, ResourceError
from deepstack.records.analyses import analysis_names
from deepstack.records.append_log import extent
from deepstack.records.files import CHECKSUMS, mapping, plain_file, sha256, trouble
from deepstack.records.folder import ENDED, STATES, RunFolder
from deepstack.records.published import is_published
from deepstack.records.run import find_runs, folders_below, natural, read_csv

STATUS = "status.json"
STATE = "state.json"
# log.txt and .lock record what people and processes did; they are not results.  status.json holds
# the sha256 of checksums.json, which in turn holds one of the rest of status.json.
DATA = (
    "config.yaml", "meta.json", "columns.json", "[!.]*.csv", "output.txt", "layers/[!.]*.npy",
    "checkpoint/[0-9]*/[!.]*", "weights/[0-9]*/[!.]*", "plugins/[!.]*",
)  # fmt: skip
# A folder with one of these files is a run.
SIGNS = ("config.yaml", "status.json", "meta.json", "steps.csv")


def damage(path: Path, largest: int | None = None) -> str | None:
    """Describe the first file of a checkpoint that differs from its sha256; None if none does.

    largest: files of more bytes are reported without being read.
    """
    try:
        sums = mapping(path / CHECKSUMS)
        if STATE not in sums or not all(PurePosixPath(name).name == name for name in sums):
            return f"{CHECKSUMS} is not a list of its files"
        for name, wanted in sums.items():
            if sha256(plain_file(path / name, largest)) != wanted:
                return f"{name} is not what was written (sha256 differs)"
        extra = {file.name for file in path.glob("*.safetensors")} - set(sums)
        if extra:
            return f"{min(extra)} is not one of its files"
    except ValueError as error:  # no JSON object, or a name that no file can have
        return f"{CHECKSUMS} {error}"
    except (OSError, ResourceError) as error:
        return str(error).removeprefix(f"{path}/")
    return None


def write_end(
    folder: RunFolder,
    state: str,
    step: int,
    *,
    checkpoints: bool = True,
    logs: Mapping[str, str] | None = None,
    **about: Any,
) -> None:
    """Write status.json, which states how a run has ended.

    A run that is done or has diverged gets checksums.json first: {relative path: sha256} of all its
    data.

    checkpoints: whether checkpoints are data; False for a run that will remove them.
    logs: the sha256 of logs, where known.
    about: further values for status.json.

    Raises ResourceError when the disk refuses.
    """
    if state not in ENDED:
        folder.write_status(state, step, **about)
        return
    path = folder.path / CHECKSUMS
    with trouble(folder.path):
        sums = dict(logs or {})
        for name, file in data_files(folder).items():
            if name not in sums and (checkpoints or not name.startswith("checkpoint/")):
                sums[name] = sha256(file)
        sums[STATUS] = status_sum({"state": state, "step": step, "error": None, **about})
        folder.write_json(path, sums)
        folder.write_status(state, step, checksums=sha256(path), **about)


def status_sum(status: Mapping[str, Any]) -> str:
    """Return the sha256 of status.json's values other than the sha256 of checksums.json.

    Required by test_a_change_of_a_finished_run_is_named.
    """
    values = {key: value for key, value in status.items() if key != "checksums"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def data_files(folder: RunFolder) -> dict[str, Path]:
    """Return {relative path: path} of a run's data files, sorted, without hidden ones."""
    paths = (path for pattern in DATA for path in folder.path.glob(pattern))
    return dict(sorted((path.relative_to(folder.path).as_posix(), path) for path in paths))


class Inspection:
    """The result of inspecting every file of a run.

    A run that has ended has checksums.json, and status.json has the sha256 of that.  In any other
    run, checkpoints have checksums of themselves and of the logs up to their step.  Files without a
    checksum are read.  An analysis has separate checksums.

    state: of status.json, or 'interrupted' if it is 'running' and no process holds the run.
    files: number of files compared with a sha256.
    problems: one line each, naming the file.
    verdict: one of 'damaged', 'no checksums' (ended, of an earlier version), 'so far' (not ended),
        'no weights' (published without its checkpoints, other files whole) and 'whole'.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.files = 0
        self.problems: list[str] = []
        status = self._read_status()
        state = status.get("state", "interrupted")
        self.state: str = state if state in STATES else "unknown"
        if state == "running" and folder.holder() is None:
            self.state = "interrupted"
        self._compare_analyses()
        # In a run that has not ended, checksums were written just before a kill and are outdated.
        if self.state in ENDED and (folder.path / CHECKSUMS).exists():
            verdict = self._compare_all(status)
        else:
            verdict = "no checksums" if self.state in ENDED else "so far"
            if "checksums" in status:
                self._add(CHECKSUMS, "missing")
            self._read_all()
            self._compare_checkpoints()
            self._compare_kept_weights()
        self.verdict = "damaged" if self.problems else verdict

    def _add(self, name: str, problem: str) -> None:
        self.problems.append(f"{name}: {problem}")

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Add the problem that a file cannot be read if the block raises an error."""
        try:
            yield
        except (OSError, ValueError, DeepstackError) as error:
            why = error.strerror if isinstance(error, OSError) else None
            # The message of a file that cannot be read advises to run this command.
            why = why or str(error).partition("; `deepstack verify ")[0]
            self._add(name, f"unreadable ({why})")

    def _read_status(self) -> dict[str, Any]:
        """Return status.json; {} if it is missing, as in a run killed before it began."""
        folder, status = self.folder, dict[str, Any]()
        if folder.status_path.exists():
            with self._reading(STATUS):
                status = mapping(folder.status_path)
                if status.get("state") not in STATES:
                    allowed = ", ".join(STATES)
                    self._add(STATUS, f"found state {status.get('state')!r}; allowed {allowed}")
        elif (folder.path / CHECKSUMS).exists() or folder.checkpoints():
            self._add(STATUS, "missing")
        return status

    def _compare_analyses(self) -> None:
        """Compare every file of every analysis with its sha256; a link is none of its files."""
        for name in analysis_names(self.folder):
            path, label = self.folder.analysis_dir / name, f"analysis/{name}"
            with self._reading(f"{label}/{CHECKSUMS}"):
                listed = mapping(path / CHECKSUMS)
                sums = {f"{label}/{file}": wanted for file, wanted in listed.items()}
                there = {f"{label}/{p.name}": p for p in path.iterdir() if not p.is_symlink()}
                del there[f"{label}/{CHECKSUMS}"]
                self._compare_files(sums, there)

    def _compare_files(self, sums: Mapping[str, Any], there: Mapping[str, Path]) -> None:
        """Compare files with their sha256, both by relative path."""
        for name, wanted in sums.items():
            if name not in there:
                self._add(name, "missing")
            elif not there[name].is_file():  # reading a pipe would block
                self._add(name, "unreadable (not a file)")
            else:
                self.files += 1
                with self._reading(name):
                    if sha256(there[name]) != wanted:
                        self._add(name, "changed (sha256 differs)")
        for name in sorted(there.keys() - sums.keys()):
            self._add(name, f"not listed in {CHECKSUMS}")

    def _compare_all(self, status: Mapping[str, Any]) -> str:
        """Compare all data files with checksums.json, and that with its sha256 in status.json.

        Returns the verdict without a problem.
        """
        folder = self.folder
        sums: dict[str, Any] = {}
        with self._reading(CHECKSUMS):
            if "checksums" not in status:
                self._add(STATUS, f"has no sha256 of {CHECKSUMS}")
            elif sha256(plain_file(folder.path / CHECKSUMS)) != status["checksums"]:
                self._add(CHECKSUMS, "changed (its sha256 is not the one in status.json)")
            sums = mapping(folder.path / CHECKSUMS)
        if not sums:
            return "damaged"
        if sums.pop(STATUS, None) not in (None, status_sum(status)):  # earlier versions have none
            self._add(STATUS, "changed (sha256 differs)")
        has_weights = not is_published(folder.path) or folder.checkpoint_dir.exists()
        if not has_weights:
            sums = {n: s for n, s in sums.items() if not n.startswith(("checkpoint/", "weights/"))}
        there = data_files(folder)
        for step in folder.checkpoints():
            # A run killed before it removed its checkpoints still has them, whole and unlisted.
            names = {name for name in there if name.startswith(f"checkpoint/{step}/")}
            if not names & sums.keys() and damage(folder.checkpoint_path(step)) is None:
                there = {name: path for name, path in there.items() if name not in names}
        self._compare_files(sums, there)
        return "whole" if has_weights else "no weights"

    def _read_all(self) -> None:
        """Read the files that have no sha256."""
        folder = self.folder
        readers = {
            "config.yaml": folder.read_config,
            "meta.json": folder.read_meta,
            "columns.json": folder.read_columns,
        }
        for name, read in readers.items():
            with self._reading(name):
                read()
        for path in sorted(folder.path.glob("*.csv")):
            with self._reading(path.name):
                read_csv(path, ("step",))
        if any(folder.layers_dir.glob("[!.]*.npy")) and folder.last_row():
            # A kill may prevent it only before the first row: it follows the snapshot.
            if not (folder.layers_dir / "steps.npy").exists():
                self._add("layers/steps.npy", "missing")
        for name in folder.layer_names():
            with self._reading(f"layers/{name}.npy"):
                folder.read_layers(name)
        if self.state in ENDED:
            with self._reading("steps.csv"):
                if not folder.ends_at(step := folder.read_status().get("step")):
                    self._add("steps.csv", f"does not end at step {step}, as status.json says")

    def _compare_checkpoints(self) -> None:
        """Compare checkpoints with their checksums, and logs with those in the newest whole one."""
        has_compared_logs = False
        for step in reversed(self.folder.checkpoints()):
            path = self.folder.checkpoint_path(step)
            if problem := damage(path):
                if path.is_dir():  # otherwise the process at work has just removed it
                    self._add(f"checkpoint/{step}", problem)
                continue
            self.files += len(list(path.glob("*")))
            if not has_compared_logs:
                has_compared_logs = True
                self._compare_logs(step)

    def _compare_kept_weights(self) -> None:
        """Compare the weights that the run keeps with their checksums."""
        for step in self.folder.kept_steps():
            path = self.folder.kept_path(step)
            if problem := damage(path):
                self._add(f"weights/{step}", problem)
            else:
                self.files += len(list(path.glob("*")))

    def _compare_logs(self, step: int) -> None:
        """Compare the logs, up to the step of a checkpoint, with the checksums in it."""
        logs: Any = {}
        with self._reading(f"checkpoint/{step}/{STATE}"):
            logs = mapping(self.folder.checkpoint_path(step) / STATE).get("logs")
        if not isinstance(logs, dict):
            return
        for name, wanted in logs.items():
            self.files += 1
            path = self.folder.csv_path(PurePosixPath(name).stem)
            with self._reading(path.name):
                if not path.exists():
                    self._add(path.name, "missing")
                elif extent(path, step).sha256 != wanted:
                    self._add(path.name, f"changed (sha256 up to step {step} differs)")


def folders_to_inspect(path: str | os.PathLike[str]) -> list[RunFolder]:
    """Return the runs in a run, study or results folder, also those without a config.yaml.

    Raises NothingMatchedError when there is none.
    """
    folders = [
        folder
        for folder in folders_below(Path(path))
        if any((folder / sign).is_file() for sign in SIGNS)
    ]
    if not folders:
        find_runs(path)  # raises
    return [RunFolder(folder) for folder in sorted(folders, key=natural)]


def problems(folder: RunFolder) -> list[str]:
    """Return a line for each problem of the files of a run; empty without problems."""
    return Inspection(folder).problems
