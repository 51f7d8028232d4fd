"""Folder sync: sends the changes of a run folder as bytes and writes them to a copy.

One rule keeps the copy resumable at every moment: changes are written in the reverse order of their
reading.  Files that refer to others (status.json, checkpoints) are read first and written last, so
that the copy always has the rows to which they refer.
"""

import hashlib
import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from deepstack.records import RunFolder, files

# The first of these in a path decides when it is read; layers/steps.npy counts the others' records.
READ_FIRST = ("status.json", "meta.json", "checkpoint", "steps.npy")


class FolderChanges(NamedTuple):
    """The difference between a run folder and its copy.

    files: for each file its path in the folder, the size of the copy that stays, and the bytes
        after it.
    removed: paths of files.
    """

    files: list[tuple[str, int, bytes]]
    removed: list[str]


class Source:
    """The folder that a run writes.

    Of a log that grew, only the new rows are sent.  The sha256 of the part sent before shows
    whether the file has only grown.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._sent: dict[str, tuple[int, int, str]] = {}  # size, time of change, sha256

    def changes(self) -> FolderChanges:
        """Return the changes since the last call; files that vanish meanwhile are not an error."""
        files: list[tuple[str, int, bytes]] = []
        names = visible_files(self.folder.path)
        for name in sorted(names, key=reading_order):
            with suppress(FileNotFoundError):
                files += self._compare(name)
        removed = sorted(self._sent.keys() - set(names))
        for name in removed:
            del self._sent[name]
        return FolderChanges(files[::-1], removed)

    def _compare(self, name: str) -> list[tuple[str, int, bytes]]:
        path = self.folder.path / name
        stat = path.stat()
        size, changed_at, digest = self._sent.get(name, (0, 0, ""))
        if (size, changed_at) == (stat.st_size, stat.st_mtime_ns):
            return []
        with files.open_file(path) as file:
            data = file.read()
        self._sent[name] = (len(data), stat.st_mtime_ns, hashlib.sha256(data).hexdigest())
        if hashlib.sha256(data[:size]).hexdigest() != digest:
            return [(name, 0, data)]
        return [(name, size, data[size:])] if len(data) > size else []


def visible_files(folder: Path) -> list[str]:
    """Return the paths of a folder's files, without drafts and locks, whose names begin with '.'"""
    names = []
    for path, folders, files_here in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(path).relative_to(folder)
        names += [(inside / name).as_posix() for name in files_here if not name.startswith(".")]
    return names


def reading_order(name: str) -> tuple[int, str]:
    """Return the sort key of a path: its place in READ_FIRST, then the name."""
    parts = PurePosixPath(name).parts
    ranks = [rank for rank, first in enumerate(READ_FIRST) if first in parts]
    return min(ranks, default=len(READ_FIRST)), name


def write_changes(folder: RunFolder, changes: FolderChanges) -> None:
    """Write changes to a copy, whose lock the caller holds.

    Raises ResourceError when the disk refuses, ValueError for a path outside of the folder.
    """
    for name, size, data in changes.files:
        path = path_in(folder, name)
        if size == 0:
            files.replace(path, data, folder.path)
        else:
            files.rewrite_end(path, size, data, folder.path)
    for name in changes.removed:
        path = path_in(folder, name)
        with files.trouble(path):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # other files of the checkpoint remain
            path.parent.rmdir()


def path_in(folder: RunFolder, name: str) -> Path:
    """Return the path of a file of the folder; ValueError for a name that leads out of it."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ValueError(f"{name!r} is not a file of a run folder")
    return folder.path / pure
