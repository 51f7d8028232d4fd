"""Files that are either the old or the new ones, and a lock that dies with its holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from deepstack.errors import LockedError, ResourceError

# Long enough for a holder that has the lock but has not written its name yet, and for a reader
# that looks at the lock in passing; well below the two seconds in which a refusal is promised.
PATIENCE_SECONDS = 0.6

# A link is not followed (its target would be written over), a pipe not waited for.
_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# Bytes above which the size of a file is questioned before it is read.
LARGE = 2**26

_NOT_OF_SPACE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR,
    errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG,
)  # fmt: skip

_held: set[int] = set()


def _forget_locks_in_child() -> None:
    # A forked child shares the open file, and with it the lock: it would outlive its parent.
    for descriptor in list(_held):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks_in_child)


@contextlib.contextmanager
def trouble(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into a ResourceError with path, cause and free space.

    The space is left out where it has nothing to do with the cause.
    """
    try:
        yield
    except OSError as error:
        space = ""
        with contextlib.suppress(OSError, StopIteration):
            there = next(folder for folder in (path, *path.parents) if folder.is_dir())
            free = shutil.disk_usage(there).free
            if error.errno not in _NOT_OF_SPACE:
                space = f" ({free / 1e6:.0f} MB free)"
        raise ResourceError(f"{path}: {error.strerror or error}{space}") from error


def read(path: Path) -> bytes | None:
    """The bytes of a file; None where there is none.

    Raises ResourceError for what is no file (a folder, a pipe, a device): it is not waited for.
    """
    try:
        with reading(path) as file:
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror or error}") from error


def parse_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object that these bytes hold; raises ValueError for anything else."""
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError("is too deeply nested") from None
    except ValueError as error:
        raise ValueError(f"is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError("is no JSON object")
    return value


def reading(path: Path) -> BinaryIO:
    """A file opened to read; raises OSError, and ResourceError for what is no file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ResourceError(f"{path}: found something that is no file; it is not read")
        refuse_sparse(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def refuse_sparse(path: Path, descriptor: int) -> None:
    """Raise OSError for a large file of which the disk holds less than half.

    Such a file takes no space and hours to read; deepstack writes every byte of its files.
    """
    size = os.fstat(descriptor).st_size
    if size <= LARGE:
        return
    held = end = 0
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data behind `end`
                break
            return  # this file system does not tell
        held += end - start
    os.lseek(descriptor, 0, os.SEEK_SET)
    if 2 * held < size:
        raise OSError(f"{path.name} has {size:,} bytes, of which the disk holds {held:,}")


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable.

    Some network file systems cannot, and a folder that may not be listed cannot be synced either:
    both are fine.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def refuse_links(folder: Path, below: Sequence[str]) -> None:
    """Raise ResourceError where a folder, or one of those `below` in it, holds more than files.

    Opened for writing, a link would lead to somebody else's file, and a pipe would be waited for.
    """
    for where in (folder, *(folder / name for name in below)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(where) as found:
            for entry in found:
                if not entry.is_file(follow_symlinks=False) and not entry.is_dir(
                    follow_symlinks=False
                ):
                    kind = "a link" if entry.is_symlink() else "no file"
                    raise ResourceError(
                        f"{entry.path} is {kind}, and training would write to it; put a file or "
                        "folder of its own there, or move it away"
                    )


def make_folder(path: Path) -> list[Path]:
    """Make a folder and those above it, and return the new ones; their names are durable."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in new:
        sync_folder(folder.parent)
    return new


def replace(path: Path, data: bytes) -> None:
    """Write beside, sync, rename, sync the folder: readers see the old file or the new one.

    Raises ResourceError when the disk refuses; the old file is then unharmed.
    """
    replace_all(path.parent, [(path.name, data)])


def replace_all(folder: Path, contents: Iterable[tuple[str, bytes]]) -> None:
    """`replace` for (name, data) of one folder: each file is the old or the new one at any moment.

    Their names reach the disk together, which takes half as long as one by one.
    """
    # The holder of the folder's lock is the only writer, so one fixed name is enough, and what
    # a killed process left there is overwritten by the next.
    drafts: dict[Path, Path] = {}
    try:
        with trouble(folder):
            make_folder(folder)
        for name, data in contents:
            path = folder / name
            drafts[path] = folder / f".{name}.new"
            with trouble(path), open(drafts[path], "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for path, draft in drafts.items():
            with trouble(path):
                os.replace(draft, path)
        with trouble(folder):
            sync_folder(folder)
    except BaseException:
        for draft in drafts.values():
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; the system frees it when the process ends, however it ends.

    Folders that were made for it go with it where an error came before anything else did.  Raises
    LockedError, naming the holder, when another process has it for longer than a moment.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    descriptor, new = _opened(path)
    try:
        while not _try_lock(descriptor, fcntl.LOCK_EX, path) or not _is_at(descriptor, path):
            if time.monotonic() > deadline:
                found = _describe(_read_holder(descriptor))
                raise LockedError(f"{path.parent} is in use by {found}")
            time.sleep(0.02)
            if not _is_at(descriptor, path):  # its folder was moved away while this one waited
                _close(descriptor)
                descriptor, new = _opened(path)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": int(time.time())}
        with trouble(path):
            # A kill may once have come between making these folders and syncing their names.
            for above in path.parent.parents[:2]:
                sync_folder(above)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, (json.dumps(holder) + "\n").encode(), 0)
        try:
            yield
        except BaseException:
            _leave_nothing(path, new)
            raise
    finally:
        _close(descriptor)


def _opened(path: Path) -> tuple[int, list[Path]]:
    """A descriptor of the lock file, made where it is missing, and the folders made for it."""
    with trouble(path):
        for last in (False, False, True):
            try:
                new = make_folder(path.parent)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o644)
                break
            except FileNotFoundError:  # another process leaves nothing behind just now
                if last:
                    raise
    _held.add(descriptor)
    return descriptor, new


def _leave_nothing(path: Path, new: Sequence[Path]) -> None:
    """Remove the folders made for a lock file that nothing but it is in."""
    with contextlib.suppress(OSError):
        if path.parent in new and os.listdir(path.parent) == [path.name]:
            path.unlink()
            for folder in new:
                folder.rmdir()


def _close(descriptor: int) -> None:
    if descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one of that path."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def holder(path: Path) -> dict[str, object] | None:
    """Who holds the lock file `path` now: {pid, host, since}, or None when it is free."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _NO_LINK)
    except OSError:
        return None
    try:
        # A shared lock, given back at once: `locked` waits long enough not to notice.
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
        return parse_object(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}


def _describe(found: dict[str, object]) -> str:
    if "pid" not in found:
        return "another process"
    return f"process {found['pid']} on {found.get('host', 'an unknown host')}"
