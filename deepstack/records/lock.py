"""Locks on folders that end with the process that holds them.

The lock is `fcntl.flock` itself.  The package filelock cannot tell who holds a folder without
writing to it.  On a file system without locks its file may outlive a killed process.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from deepstack.base.errors import LockedError, ResourceError
from deepstack.records import files, opened
from deepstack.records.published import refuse_published

# Long enough for a holder that has not written its name yet, and for a reader that holds the lock
# for an instant; well below the two seconds in which a refusal is promised.
PATIENCE_SECONDS = 0.6


@contextlib.contextmanager
def locked(path: Path, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Hold the lock file `path`; the system frees it when the process ends, however it ends.

    After an error, removes the folders made for it if they hold nothing else.  Raises LockedError,
    naming the holder, if another process keeps it longer than `patience` in seconds.  Required by
    the planted faults lock_not_released_by_a_kill and lock_without_effect.
    """
    refuse_published(path.parent)
    with files.trouble(path):
        new = files.make_folder(path.parent)
        with opened.open_folder(path.parent) as parent:
            descriptor = opened.open_regular(path.name, parent, os.O_RDWR | os.O_CREAT)
    _lock_descriptors.add(descriptor)
    deadline = time.monotonic() + patience
    try:
        while not _try_lock(descriptor, fcntl.LOCK_EX, path):
            if time.monotonic() > deadline:
                raise LockedError(
                    f"{path.parent} is in use by {describe_holder(_read_holder(descriptor))}"
                )
            time.sleep(0.02)
        if not _is_at(descriptor, path):
            raise LockedError(f"{path.parent} was moved away by another process just now")
        try:
            _write_holder(descriptor, path)
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                if path.parent in new and os.listdir(path.parent) == [path.name]:
                    path.unlink()
                    for folder in new:
                        folder.rmdir()
            raise
    finally:
        _close(descriptor)


_lock_descriptors: set[int] = set()


def _write_holder(descriptor: int, path: Path) -> None:
    """Write process, host and time into an opened lock file."""
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": int(time.time())}
    with files.trouble(path):
        # An earlier process may have been killed after making these folders, before the sync.
        for above in path.parent.parents[:2]:
            files.sync_folder(above)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)


def _close(descriptor: int) -> None:
    if descriptor in _lock_descriptors:
        _lock_descriptors.discard(descriptor)
        os.close(descriptor)


def _close_locks_in_child() -> None:
    """Close inherited lock files: a forked child would keep the lock after its parent ends.

    Required by test_a_forked_child_does_not_keep_the_lock_of_a_killed_parent.
    """
    for descriptor in list(_lock_descriptors):
        _close(descriptor)


os.register_at_fork(after_in_child=_close_locks_in_child)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether the open file is the one at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def holder(path: Path) -> dict[str, object] | None:
    """Return the holder of the lock file `path`, {pid, host, since}; None if it is free."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # A shared lock, released at once; `locked` waits longer than this takes.
        return None if _try_lock(descriptor, fcntl.LOCK_SH, path) else _read_holder(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        raise ResourceError(
            f"{path}: this file system has no locks ({error.strerror}); choose another with --out"
        ) from error
    return True


def _read_holder(descriptor: int) -> dict[str, object]:
    try:
        return files.parse_object(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}


def describe_holder(holder: Mapping[str, object]) -> str:
    """Return 'process 12 on a host' for what `holder` returns."""
    if "pid" not in holder:
        return "another process"
    return f"process {holder['pid']} on {holder.get('host', 'an unknown host')}"
