"""The trash of a results folder: runs and studies are moved into it, then deleted.

<out>/.trash/<time>/<study>/<run>; to restore one, move it back.
"""

import os
import shlex
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from deepstack.base.errors import ConfigError, LockedError, NothingMatchedError
from deepstack.records.files import describe_holder, sync_folder, trouble
from deepstack.records.folder import RunFolder
from deepstack.records.published import refuse_published
from deepstack.records.run import RESULTS, find_runs

TRASH = ".trash"


def removal(run: Path) -> str:
    """Return the `deepstack rm` command for a run, quoted for a shell."""
    out = run.parent.parent
    elsewhere = "" if str(out) == RESULTS else f" --out {shlex.quote(str(out))}"
    return f"deepstack rm {shlex.quote(str(run))}{elsewhere}"


def to_trash(
    paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]
) -> list[tuple[Path, Path]]:
    """Move runs and studies of the results folder `out` into its trash: (from, to) of each.

    Checks all of them before it moves the first.  Raises ConfigError for a symbolic link and for a
    path that is no run or study below `out`.  Raises NothingMatchedError for a folder without runs,
    and LockedError if another process works on one of the runs.
    """
    chosen = dict(_check_path(Path(path), Path(out)) for path in paths)
    trash = _trash_of(Path(out)) / datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    # A run moves with its study if that is chosen too.
    moves = [(path, trash / below) for path, below in chosen.items() if path.parent not in chosen]
    with trouble(trash):
        trash.mkdir(parents=True)
    for path, target in moves:
        with trouble(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.rename(path, target)
            sync_folder(target.parent)
            sync_folder(path.parent)
    return moves


def list_trash(out: str | os.PathLike[str]) -> list[Path]:
    """Return the runs in the trash of a results folder, sorted.

    Raises ConfigError if the trash is a link.
    """
    folders = (Path(folder) for folder, _, _ in os.walk(_trash_of(Path(out))))
    return sorted(folder for folder in folders if RunFolder(folder).exists())


def empty_trash(out: str | os.PathLike[str]) -> tuple[int, int]:
    """Delete the contents of a results folder's trash; return the numbers of runs and bytes.

    A symbolic link in it is removed, its target is not.  Raises LockedError if another process
    works on a run in it, ConfigError if the trash itself is a link.
    """
    trash, runs = _trash_of(Path(out)), list_trash(out)
    if not trash.is_dir():
        return 0, 0
    for run in runs:
        if RunFolder(run).holder() is not None:
            raise LockedError(f"{run} is in use; nothing was deleted")
    size = sum(path.lstat().st_size for path in trash.rglob("*") if not path.is_dir())
    with trouble(trash):
        shutil.rmtree(trash)
        trash.mkdir()
    return len(runs), size


def _check_path(path: Path, out: Path) -> tuple[Path, Path]:
    """Return a run's or study's path without links, and its path below the results folder."""
    if path.name in ("", ".."):
        path = path.resolve()
    root, real = out.resolve(), path.parent.resolve() / path.name
    if not real.is_relative_to(root) or real == root:
        raise ConfigError(
            f"{path} is not below {out}; allowed a run or a study there, or give its folder "
            "of results with --out"
        )
    refuse_published(real)
    relative = real.relative_to(root)
    if real.is_symlink():
        raise ConfigError(f"{path} is a symbolic link; allowed a folder of its own")
    if not real.is_dir():
        raise NothingMatchedError(f"{path}: no such folder")
    if len(relative.parts) > 2 or any(part.startswith(".") for part in relative.parts):
        raise ConfigError(f"{path} is no run and no study: those are {out}/<study>/<run>")
    if len(relative.parts) == 2 and not RunFolder(real).exists():
        raise NothingMatchedError(f"{path} is no run: it has no config.yaml")
    for run in find_runs(real):
        # A link is moved itself, not its target.
        if not run.path.is_symlink() and (holder := run.folder.holder()) is not None:
            raise LockedError(f"{run.path} is in use by {describe_holder(holder)}")
    return real, relative


def _trash_of(out: Path) -> Path:
    trash = out / TRASH
    if trash.is_symlink() or (trash.exists() and not trash.is_dir()):
        raise ConfigError(f"{trash} is not a folder of its own; move it away")
    return trash
