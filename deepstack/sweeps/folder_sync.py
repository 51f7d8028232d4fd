"""A run folder in two places: what is new in one is sent as bytes and written in the other."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from deepstack.records import RunFolder, files

CHECKSUMS = "checksums.json"


@dataclass
class FolderChanges:
    """What one folder has that the other has not.

    grown: name -> (size there, the bytes behind it); whole: name -> new content; checkpoints:
    step -> name -> content; kept: the steps that have a checkpoint.  Names are relative.
    """

    grown: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    whole: dict[str, bytes] = field(default_factory=dict)
    checkpoints: dict[int, dict[str, bytes]] = field(default_factory=dict)
    kept: list[int] | None = None


class Source:
    """The folder that a run writes: `news()` is what has come since the last time.

    A log grows, and only its new rows are sent; whether that is all that has happened to a file is
    seen from the sha256 of what was sent before, never assumed.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._sent: dict[str, tuple[int, str]] = {}
        self._stamps: dict[str, tuple[int, int]] = {}
        self._kept: list[int] = []

    def news(self) -> FolderChanges:
        """Files that are new or changed.  Raises nothing for those that vanish meanwhile."""
        news = FolderChanges()
        # Checkpoints first: the logs that are read after one hold all the rows that it counts on.
        steps = self.folder.checkpoints()
        for step in steps:
            if step not in self._kept and (found := whole_checkpoint(self.folder, step)):
                news.checkpoints[step] = found
        known = [step for step in steps if step in self._kept or step in news.checkpoints]
        if known != self._kept:
            news.kept = self._kept = known
        for path in plain_files(self.folder):
            self._look_at(path, news)
        return news

    def _look_at(self, path: Path, news: FolderChanges) -> None:
        name = path.relative_to(self.folder.path).as_posix()
        try:
            facts = path.stat()
            stamp = (facts.st_size, facts.st_mtime_ns)
            if self._stamps.get(name) == stamp:
                return
            data = path.read_bytes()
        except FileNotFoundError:
            return
        self._stamps[name] = stamp
        size, digest = self._sent.get(name, (0, ""))
        if name in self._sent and hashlib.sha256(data[:size]).hexdigest() == digest:
            if len(data) > size:
                news.grown[name] = (size, data[size:])
        else:
            news.whole[name] = data
        self._sent[name] = (len(data), hashlib.sha256(data).hexdigest())


class Target:
    """A folder that is kept like the one where the run takes place; its lock is the caller's."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def write(self, news: FolderChanges) -> None:
        """Write what is new so that at every moment the folder is one that a run can go on from.

        Logs before the checkpoints that count on them, what says how the run stands last.  Raises
        ResourceError when the disk refuses, ValueError for a name that leads elsewhere.
        """
        last = {path.name for path in (self.folder.meta_path, self.folder.status_path)}
        for name, (size, data) in news.grown.items():
            path = self._inside(name)
            with files.trouble(path), open(path, "r+b") as file:
                file.truncate(size)
                file.seek(size)
                file.write(data)
        for name in sorted(news.whole, key=lambda name: (name in last, name)):
            if name not in last:
                files.replace(self._inside(name), news.whole[name])
        for step, parts in news.checkpoints.items():
            self._write_checkpoint(step, parts)
        for name in sorted(last & set(news.whole)):
            files.replace(self._inside(name), news.whole[name])
        for step in self.folder.checkpoints() if news.kept is not None else []:
            if step not in (news.kept or []):
                shutil.rmtree(self.folder.checkpoint_path(step), ignore_errors=True)

    def _write_checkpoint(self, step: int, parts: dict[str, bytes]) -> None:
        target = self.folder.checkpoint_path(int(step))
        draft = target.with_name(f".draft-{step}")
        shutil.rmtree(draft, ignore_errors=True)
        for name, data in parts.items():
            files.replace(draft / PurePosixPath(name).name, data)
        with files.trouble(target):
            shutil.rmtree(target, ignore_errors=True)
            draft.rename(target)
            files.sync_folder(target.parent)

    def _inside(self, name: str) -> Path:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or not pure.parts:
            raise ValueError(f"{name!r} is no file of a run folder")
        return self.folder.path / pure


def plain_files(folder: RunFolder) -> list[Path]:
    """The visible files outside of checkpoints, layers/steps.npy before the layers it names."""
    found: list[Path] = []
    for where, folders, names in os.walk(folder.path):  # passes over what vanishes meanwhile
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and Path(where, name) != folder.checkpoint_dir
        ]
        found += [Path(where, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda path: (path.name != "steps.npy", path))


def whole_checkpoint(folder: RunFolder, step: int) -> dict[str, bytes]:
    """The files of a checkpoint, or none of them when one was removed while they were read."""
    try:
        parts = {path.name: path.read_bytes() for path in folder.checkpoint_path(step).iterdir()}
        named = json.loads(parts[CHECKSUMS])
    except (FileNotFoundError, KeyError, ValueError):
        return {}
    return parts if set(named) <= set(parts) else {}
