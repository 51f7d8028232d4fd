"""Folder sync: sends the changes of a run folder as bytes and writes them to a copy."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from deepstack.records import CHECKSUMS, RunFolder, files


@dataclass
class FolderChanges:
    """The difference between a run folder and its copy.

    grown: name -> (size of the copy, the bytes after it); whole: name -> new content; checkpoints:
    step -> name -> content; kept: the steps with a checkpoint, None if unchanged.  Names are
    relative paths.
    """

    grown: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    whole: dict[str, bytes] = field(default_factory=dict)
    checkpoints: dict[int, dict[str, bytes]] = field(default_factory=dict)
    kept: list[int] | None = None


class Source:
    """The folder that a run writes.

    Of a log that grew, only the new rows are sent.  The sha256 of the part sent before shows
    whether the file has only grown.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._sent: dict[str, tuple[int, int, str]] = {}  # size, time of change, sha256
        self._kept: list[int] = []

    def changes(self) -> FolderChanges:
        """Return the changes since the last call; files that vanish meanwhile are no error."""
        changes = FolderChanges()
        # Checkpoints first: the logs that are read later hold all rows of a checkpoint.
        steps = self.folder.checkpoints()
        for step in steps:
            if step not in self._kept and (parts := read_checkpoint(self.folder, step)):
                changes.checkpoints[step] = parts
        known = [step for step in steps if step in self._kept or step in changes.checkpoints]
        if known != self._kept:
            changes.kept = self._kept = known
        # layers/steps.npy before other layers
        for path in sorted(plain_files(self.folder), key=lambda p: (p.name != "steps.npy", p)):
            self._compare(path, changes)
        return changes

    def _compare(self, path: Path, changes: FolderChanges) -> None:
        name = path.relative_to(self.folder.path).as_posix()
        size, changed_at, digest = self._sent.get(name, (0, 0, ""))
        try:
            stat = path.stat()
            if (size, changed_at) == (stat.st_size, stat.st_mtime_ns):
                return
            data = path.read_bytes()
        except FileNotFoundError:
            return
        if hashlib.sha256(data[:size]).hexdigest() != digest:
            changes.whole[name] = data
        elif len(data) > size:
            changes.grown[name] = (size, data[size:])
        self._sent[name] = (len(data), stat.st_mtime_ns, hashlib.sha256(data).hexdigest())


def write_changes(folder: RunFolder, changes: FolderChanges) -> None:
    """Write changes to a copy, whose lock the caller holds, so that a run can always resume there.

    Logs come before the checkpoints that refer to their rows; meta.json and status.json come last.
    Raises ResourceError when the disk refuses, ValueError for a name outside of the folder.
    """
    last = {folder.meta_path.name, folder.status_path.name} & set(changes.whole)
    for name, (size, data) in changes.grown.items():
        path = inside(folder, name)
        with files.trouble(path), open(path, "r+b") as file:
            file.truncate(size)
            file.seek(size)
            file.write(data)
    for name in sorted(set(changes.whole) - last):
        files.replace(inside(folder, name), changes.whole[name])
    for step, parts in changes.checkpoints.items():
        write_checkpoint(folder, step, parts)
    for name in sorted(last):
        files.replace(inside(folder, name), changes.whole[name])
    if changes.kept is not None:
        for step in set(folder.checkpoints()) - set(changes.kept):
            shutil.rmtree(folder.checkpoint_path(step), ignore_errors=True)


def write_checkpoint(folder: RunFolder, step: int, parts: dict[str, bytes]) -> None:
    """Write a checkpoint beside its place and rename it."""
    target = folder.checkpoint_path(int(step))
    draft = target.with_name(f".draft-{step}")
    shutil.rmtree(draft, ignore_errors=True)
    files.replace_all(draft, [(PurePosixPath(name).name, data) for name, data in parts.items()])
    with files.trouble(target):
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        files.sync_folder(target.parent)


def inside(folder: RunFolder, name: str) -> Path:
    """Return the path of a file of the folder; ValueError for a name that leads out of it."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ValueError(f"{name!r} is no file of a run folder")
    return folder.path / pure


def plain_files(folder: RunFolder) -> list[Path]:
    """Return the visible files outside of checkpoints."""
    paths = (path for part in ("", "layers/", "aside/") for path in folder.path.glob(f"{part}*"))
    return [path for path in paths if path.is_file() and not path.name.startswith(".")]


def read_checkpoint(folder: RunFolder, step: int) -> dict[str, bytes]:
    """Return the files of a checkpoint, or none if one was removed while they were read."""
    try:
        parts = {path.name: path.read_bytes() for path in folder.checkpoint_path(step).iterdir()}
        checksums = json.loads(parts[CHECKSUMS])
    except (FileNotFoundError, KeyError, ValueError):
        return {}
    return parts if set(checksums) <= set(parts) else {}
