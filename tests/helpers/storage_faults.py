"""Faults to plant in the storage protocol: the harness must detect them.

Each changes this process for good.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from deepstack.base.errors import LockedError, ResourceError
from deepstack.records import AppendLog, RunFolder, append_log, files, lock
from deepstack.training import checkpoint as ckpt
from deepstack.training import resume
from helpers.storage_run import STEPS, STUDY

# name -> the function that plants it, the kind of trial that must find it, and a part of the paths
# of the calls at which that trial stops
FAULTS: dict[str, tuple[Callable[[], None], str, str]] = {}


def found_by(trial: str, about: str = "") -> Callable[[Callable[[], None]], None]:
    """Register a fault under its function's name."""

    def register(plant: Callable[[], None]) -> None:
        FAULTS[plant.__name__] = plant, trial, about

    return register


def nothing(*_: object, **__: object) -> None:
    """Instead of something."""


# --- checkpoints ----------------------------------------------------------------------------


@found_by("power_cuts", "checkpoint/2")
def checkpoint_files_not_synced() -> None:
    ckpt.sync_file = nothing


@found_by("power_cuts", "draft-4")
def checkpoint_folder_not_synced() -> None:
    ckpt.sync_folder = nothing


@found_by("kills", "checkpoint/2")
def renamed_before_the_write_ends() -> None:
    def move(draft: Path, target: Path) -> None:
        contents = {path.name: path.read_bytes() for path in draft.iterdir()}
        shutil.rmtree(draft)
        target.mkdir()
        for name, data in contents.items():
            (target / name).write_bytes(data)

    move_drafts(move)


@found_by("kills", "checkpoint/2")
def checksums_before_the_data() -> None:
    def move(draft: Path, target: Path) -> None:
        target.mkdir()
        for path in sorted(draft.iterdir()):  # checksums.json is the first of all
            path.rename(target / path.name)
        draft.rmdir()

    move_drafts(move)


def move_drafts(move: Callable[[Path, Path], None]) -> None:
    """Give a finished draft its final name by other steps than one rename."""
    rename = Path.rename

    def moved(path: Path, target: Path) -> Any:
        is_draft = path.name.startswith(".draft")
        return move(path, target) if is_draft else rename(path, target)

    patch.object(Path, "rename", moved).start()


@found_by("kills", "draft-4")
def older_checkpoints_removed_first() -> None:
    save = ckpt.save

    def emptied(folder: RunFolder, checkpoint: ckpt.Checkpoint) -> None:
        ckpt.keep_only(folder, checkpoint.step)
        save(folder, checkpoint)

    ckpt.save = emptied


@found_by("kills", "draft-4")
def moments_not_restored() -> None:
    resume.load_optimizer_state = nothing


@found_by("kills", "draft-6")
def done_before_the_weights() -> None:
    def save(folder: RunFolder, checkpoint: ckpt.Checkpoint) -> None:
        if checkpoint.step == STEPS:
            folder.write_status("done", checkpoint.step)
        original(folder, checkpoint)

    original, ckpt.save = ckpt.save, save


# --- logs -----------------------------------------------------------------------------------


@found_by("power_cuts", "draft-4")
def log_not_synced_before_the_checkpoint() -> None:
    AppendLog.flush = nothing  # type: ignore[method-assign]


@found_by("kills", "steps.csv")
def rows_written_twice() -> None:
    def log(self: RunFolder, name: str, columns: Any, *_: Any, **more: Any) -> AppendLog:
        return AppendLog(self.csv_path(name), columns, compared=False)

    RunFolder.log = log  # type: ignore[method-assign]


@found_by("kills", "steps.csv")
def torn_line_kept() -> None:
    begin = AppendLog.__init__

    def behind(self: AppendLog, *words: Any, **more: Any) -> None:
        begin(self, *words, **more)
        rest = self._old.getvalue()
        self._old = io.BytesIO(rest[: rest.rfind(b"\n") + 1])

    AppendLog.__init__ = behind  # type: ignore[method-assign]


@found_by("kills", "steps.csv")
def log_truncated_on_resume() -> None:
    begin = AppendLog.__init__

    def cut(self: AppendLog, path: Path, columns: Any, replay_from: int, **more: Any) -> None:
        if path.exists():
            os.truncate(path, append_log.extent(path, replay_from).size)
        begin(self, path, columns, replay_from, **more)

    AppendLog.__init__ = cut  # type: ignore[method-assign, assignment]


@found_by("kills", "draft-4")
def log_checksum_before_the_row() -> None:
    def early(self: AppendLog) -> str:
        return append_log.extent(self.path, (self.last_step or 0) - 1).sha256

    AppendLog.sha256 = property(early)  # type: ignore[assignment, method-assign]


@found_by("refusals", "steps.csv")
def full_disk_not_reported() -> None:
    append = AppendLog._append

    def silent(self: AppendLog, data: bytes) -> None:
        with contextlib.suppress(ResourceError):
            append(self, data)

    AppendLog._append = silent  # type: ignore[method-assign]


@found_by("refusals", "steps.csv")
def short_write_not_noticed() -> None:
    def once(self: AppendLog, data: bytes) -> None:
        with files.trouble(self.path):
            self._file.write(data)

    AppendLog._append = once  # type: ignore[method-assign]


@found_by("refusals", "status.json")
def error_of_the_disk_not_translated() -> None:
    @contextlib.contextmanager
    def trouble(path: Path) -> Iterator[None]:
        yield

    files.trouble = append_log.trouble = ckpt.trouble = trouble


# --- whole files, locks ---------------------------------------------------------------------


@found_by("kills", "status.json")
def replaced_in_place() -> None:
    def replace(path: Path, data: bytes, *_: Path) -> None:
        path.write_bytes(data)

    files.replace = replace


@found_by("power_cuts", "status.json")
def replaced_without_a_sync() -> None:
    def replace(path: Path, data: bytes, *_: Path) -> None:
        beside = path.with_name(f".{path.name}.new")
        beside.write_bytes(data)
        beside.replace(path)
        files.sync_folder(path.parent)

    files.replace = replace


@found_by("power_cuts", "status.json")
def records_of_layers_not_synced_at_the_end() -> None:
    write = RunFolder.write_layers

    def unsynced(self: RunFolder, values: Any, steps: Any, **_: Any) -> None:
        write(self, values, steps, sync=False)

    RunFolder.write_layers = unsynced  # type: ignore[method-assign]


@found_by("power_cuts", "draft-4")
def new_folders_not_synced() -> None:
    sync = files.sync_folder

    def inside_only(path: Path) -> None:
        if path.name != STUDY and STUDY in path.parts:
            sync(path)

    files.sync_folder = inside_only


@found_by("kills", "status.json")
def lock_not_released_by_a_kill() -> None:
    @contextlib.contextmanager
    def locked(path: Path, patience: float = 0) -> Iterator[None]:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            raise LockedError(f"{path.parent} is in use") from None
        try:
            yield
        finally:
            path.unlink()

    lock.locked = locked


@found_by("two_writers")
def lock_without_effect() -> None:
    lock._try_lock = lambda *_: True
