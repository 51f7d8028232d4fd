"""Removal of runs and studies from a results folder.

Each run is renamed to a hidden folder and deleted there, so that a kill leaves whole runs or none.
"""

import contextlib
import os
import secrets
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepstack.base.errors import ConfigError, LockedError, NothingMatchedError
from deepstack.records.files import (
    remove_hidden_folders,
    sync_folder,
    trouble,
)
from deepstack.records.folder import REMOVED, RunFolder
from deepstack.records.lock import describe_holder, locked
from deepstack.records.published import refuse_published
from deepstack.records.run import RESULTS, find_runs, natural

TRASH = ".trash"  # a folder of removed runs that earlier versions kept


@dataclass(frozen=True)
class Removal:
    """A run, a study or an old trash that will be removed.

    path: its folder.
    runs: bytes of each run in it, by path.
    size: bytes of all.
    """

    path: Path
    runs: dict[Path, int]
    size: int


def suggest_removal(run: Path) -> str:
    """Return the `deepstack rm` command for a run, quoted for a shell."""
    out = run.parent.parent
    elsewhere = "" if str(out) == RESULTS else f" --out {shlex.quote(str(out))}"
    return f"deepstack rm {shlex.quote(str(run))}{elsewhere}"


def plan_removals(
    paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]
) -> list[Removal]:
    """Return what `remove` would delete of the results folder `out`.

    Deletes the rest of removals that were killed.  Raises ConfigError for a symbolic link and for a
    path that is not a run or study below `out`.  Raises NothingMatchedError for a folder without
    runs, and LockedError if another process works on one of the runs.
    """
    chosen = list(dict.fromkeys(_check_path(Path(path), Path(out)) for path in paths))
    # A run goes with its study if both are given.
    return [_plan(path) for path in chosen if path.parent not in chosen]


def remove(removal: Removal) -> None:
    """Delete a planned removal, run by run; a link in it is deleted, and its target stays.

    Raises LockedError, and leaves the rest, if another process works on a run by now or has begun
    one that was not planned.
    """
    for run in removal.runs:
        _delete(run)
    if removal.path not in removal.runs:
        for run in _runs_in(removal.path):
            raise LockedError(f"{run} appeared during the removal; it and its study are left")
        _delete(removal.path)


def _check_path(path: Path, out: Path) -> Path:
    """Return the path of a run, a study or the old trash, without links below `out`."""
    if path.name in ("", ".."):
        path = path.resolve()
    root, real = out.resolve(), path.parent.resolve() / path.name
    if not real.is_relative_to(root) or real == root:
        raise ConfigError(
            f"{path} is not below {out}; allowed a run or a study there, or give its folder "
            "of results with --out"
        )
    refuse_published(real)
    parts = real.relative_to(root).parts
    if real.is_symlink():
        raise ConfigError(f"{path} is a symbolic link; allowed a folder that is not a link")
    is_trash = parts == (TRASH,)
    if not is_trash and (len(parts) > 2 or any(part.startswith(".") for part in parts)):
        raise ConfigError(f"{path} is not a run or a study; these are {out}/<study>/<run>")
    remove_hidden_folders(real.parent, REMOVED + "*")
    if not real.is_dir():
        raise NothingMatchedError(f"{path}: no such folder; deepstack ls lists the runs")
    if len(parts) == 2 and not RunFolder(real).exists():
        raise NothingMatchedError(f"{path} is not a run: it has no config.yaml")
    if not is_trash:
        find_runs(real)  # raises without any
    return out.joinpath(*parts)


def _plan(path: Path) -> Removal:
    """Return the removal of a checked path; raises LockedError if a run in it is in use."""
    runs = dict[Path, int]()
    for run in sorted(_runs_in(path), key=natural):
        if (holder := RunFolder(run).holder()) is not None:
            raise LockedError(f"{run} is in use by {describe_holder(holder)}")
        runs[run] = _size(run)
    return Removal(path, runs, runs.get(path) or _size(path))


def _runs_in(path: Path) -> Iterator[Path]:
    """Yield the runs in a folder, itself included, and follow no link.

    A folder that is locked is a run too: it has no config.yaml yet.
    """
    for name, below, _ in os.walk(path):
        folder = RunFolder(name)
        if folder.exists() or folder.lock_path.exists():
            yield folder.path
            below.clear()


def _size(path: Path) -> int:
    """Return the number of bytes of the files in a folder."""
    with trouble(path):
        return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())


def _delete(path: Path) -> None:
    """Delete a run under its lock, or another folder, under a hidden name."""
    folder = RunFolder(path)
    hidden = path.with_name(REMOVED + secrets.token_hex(4))
    with contextlib.ExitStack() as stack:
        if folder.exists() or folder.lock_path.exists():
            # A training that waits for this lock is refused, because the folder has moved.
            stack.enter_context(locked(folder.lock_path, patience=0))
        with trouble(path):
            os.rename(path, hidden)
            sync_folder(path.parent)
    with trouble(path):
        while hidden.exists():
            with contextlib.suppress(FileNotFoundError):  # another process deletes it as well
                shutil.rmtree(hidden)
