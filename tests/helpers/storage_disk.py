"""A folder as a disk could hold it after a power cut, made from a trace of calls.

    disk = Disk(folder)              the present files, all of them durable
    disk.follow(call)                for each call of a trace
    disk.after_cut("strict")         path -> bytes that a power cut now would leave

POSIX promises the content of a file that was synced, and the names in a folder that was synced.
Everything else may be there or not, so the ways differ in the rest:

    now      all of it: a kill, not a power cut
    strict   nothing of it
    names    all names, but no byte that was not synced
    zeros    all names and sizes, but zeros for the bytes that were not synced
    content  all bytes, but no name that was not synced
    mixed    of every folder's changes, and of every file's bytes, some first part, by a seed
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from random import Random
from typing import Any

from helpers.storage_calls import Call

WAYS = ("now", "strict", "names", "zeros", "content", "mixed")


@dataclass(eq=False)
class File:
    """Bytes as a reader sees them now, and as they were when last synced."""

    now: bytearray = field(default_factory=bytearray)
    synced: bytes = b""

    def sync(self) -> None:
        self.synced = bytes(self.now)

    def after_cut(self, way: str, random: Random) -> bytes:
        now = bytes(self.now)
        if way in ("now", "content") or now == self.synced:
            return now
        if way == "zeros":
            kept = self.synced if now.startswith(self.synced) else b""
            return kept.ljust(len(now), b"\0")
        if way != "mixed":
            return self.synced
        if now.startswith(self.synced):
            return now[: random.randint(len(self.synced), len(now))]
        return random.choice([now, self.synced])


@dataclass(eq=False)
class Folder:
    """Names as they were when last synced, and the changes since: a new node, or none."""

    synced: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[tuple[str, File | Folder | None]] = field(default_factory=list)

    def names(self, changes: int | None = None) -> dict[str, File | Folder]:
        """The names after the first so many changes since they were synced; by default all."""
        names = dict(self.synced)
        for name, node in self.changes[:changes]:
            names.pop(name, None)
            if node is not None:
                names[name] = node
        return names

    def sync(self) -> None:
        self.synced, self.changes = self.names(), []

    def after_cut(self, way: str, random: Random) -> dict[str, File | Folder]:
        if way in ("now", "names", "zeros"):
            return self.names()
        return self.names(random.randint(0, len(self.changes)) if way == "mixed" else 0)


class Disk:
    """One folder and everything below it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.top = self._read(path)

    def _read(self, path: Path) -> Folder:
        nodes: dict[str, File | Folder] = {}
        for child in path.iterdir():
            if child.is_dir():
                nodes[child.name] = self._read(child)
            else:
                data = child.read_bytes()
                nodes[child.name] = File(bytearray(data), data)
        return Folder(nodes)

    def _find(self, path: Path) -> Any:
        """The file or folder at a path."""
        parts = path.relative_to(self.path).parts
        return reduce(lambda folder, name: folder.names()[name], parts, self.top)

    def read(self, path: Path) -> bytes:
        """The bytes of a file as a reader sees them now; none where there is no such file."""
        try:
            return bytes(self._find(path).now)
        except KeyError:
            return b""

    def follow(self, call: Call) -> None:
        """Apply a call of the real disk to this one; a failed call did nothing."""
        path = call.path
        if call.failed or call.kind == "mark" or path.name.endswith(" (deleted)"):
            return
        assert call.kind != "unknown", f"a way to change files that is not followed: {call}"
        if call.kind in ("create", "mkdir"):
            node = File() if call.kind == "create" else Folder()
            self._find(path.parent).changes.append((path.name, node))
        elif call.kind in ("unlink", "rmdir"):
            self._find(path.parent).changes.append((path.name, None))
        elif call.kind == "rename":
            node = self._find(path)
            self._find(path.parent).changes.append((path.name, None))
            self._find(call.target.parent).changes.append((call.target.name, node))
        elif call.kind == "sync":
            self._find(path).sync()
        else:
            now = self._find(path).now
            if call.kind == "write":
                now.extend(bytes(max(0, call.place - len(now))))
                now[call.place : call.place + len(call.data)] = call.data
            else:
                size = call.place if call.kind == "resize" else 0
                now[:] = now[:size].ljust(size, b"\0")

    def after_cut(self, way: str, seed: int = 0) -> dict[Path, bytes | None]:
        """Relative path -> bytes, or None for a folder."""
        return dict(_walk(self.top, Path(), way, Random(seed)))


def _walk(
    folder: Folder, place: Path, way: str, random: Random
) -> Iterator[tuple[Path, bytes | None]]:
    for name, node in sorted(folder.after_cut(way, random).items()):
        if isinstance(node, Folder):
            yield place / name, None
            yield from _walk(node, place / name, way, random)
        else:
            yield place / name, node.after_cut(way, random)


def write_out(found: dict[Path, bytes | None], folder: Path) -> None:
    """Fill a folder with what `after_cut` found."""
    for name, data in found.items():
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)


def read_in(folder: Path) -> dict[Path, bytes | None]:
    """A folder in the form of `after_cut`."""
    return Disk(folder).after_cut("now")
