"""Opens every file and folder that deepstack writes to.

Somebody else may have made a folder of results, or may write to it too.  So a file is named
relative to its opened folder, no link below a given folder is followed, no pipe is waited for, and
a new file never replaces what has its name.  No other module opens a file for writing
(tests/project/test_writing.py).  All functions raise OSError.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Container, Iterator
from pathlib import Path

# Where the system has O_PATH, a folder that may not be listed can be opened.
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# The draft of `name`; earlier versions had no random part.
_DRAFT = re.compile(r"\.(?P<name>.+?)(?P<random>\.[0-9a-f]{8})?\.new", re.DOTALL)


def followed(path: Path) -> Path:
    """Return a folder that the user named; in place of the user's own link, the folder it leads to.

    A link that another user made stays as it is, so that `open_folder` refuses it.
    """
    is_own = path.is_symlink() and path.lstat().st_uid == os.geteuid()
    return path.resolve() if is_own and path.is_dir() else path


@contextlib.contextmanager
def open_folder(path: Path, below: Path | None = None, *, make: bool = False) -> Iterator[int]:
    """Open a folder to change its contents; yield its descriptor.

    below: a folder above it, from which on no link is followed (default: the folder itself).
    make: make the folders that are missing under `below`.
    """
    base = below or path
    descriptor = _enter(base, None)
    try:
        at = base
        for part in path.relative_to(base).parts:
            at = at / part
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=descriptor)
            inner = _enter(at, descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _enter(path: Path, parent: int | None) -> int:
    try:
        if parent is None:
            return os.open(path, _FOLDER)
        return os.open(path.name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if path.is_symlink():
            to = os.readlink(path)
            why = f"the folder {path.name} is a link to {to}; nothing is written through it"
            raise OSError(error.errno, why) from error
        raise


def open_new(name: str, folder: int) -> int:
    """Make a file in an opened folder and return its descriptor; no file may have its name."""
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o666, dir_fd=folder)


def open_regular(name: str, folder: int, flags: int, mode: int = 0o666) -> int:
    """Open a file in an opened folder to change it in place; return its descriptor.

    flags: as of `os.open`.

    Refuses a link, a pipe, and a file that has another name as well (a hard link), because changing
    it would change that file too.
    """
    try:
        descriptor = os.open(name, flags | _FILE, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise OSError(error.errno, "found a link or a pipe; it is not written to") from error
        raise
    about = os.fstat(descriptor)
    if stat.S_ISREG(about.st_mode) and about.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    if stat.S_ISREG(about.st_mode):
        why = "has a second name (a hard link), whose file would change too; put a copy there"
        raise OSError(errno.EMLINK, why)
    raise OSError(errno.EINVAL, "found something that is not a file; it is not written to")


def file_in(folder: int, path: Path) -> Path:
    """Return a path of a file of an opened folder, for libraries that open it by its path.

    It stays in that folder even if another one is moved to its path; where the system has no
    such path, returns `path`.
    """
    held = Path(f"/proc/self/fd/{folder}")
    return held / path.name if held.is_dir() else path


class Draft:
    """A new file under a random name, which becomes `name` in its opened folder.

    The draft is locked until it is closed: `remove_drafts` leaves it to its living process.
    """

    def __init__(self, name: str, folder: int) -> None:
        self.name, self.folder, self.path = name, folder, ""
        while True:
            self.path = f".{name}.{secrets.token_hex(4)}.new"
            self.descriptor = open_new(self.path, folder)
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(self.descriptor, fcntl.LOCK_EX)
            if os.fstat(self.descriptor).st_nlink:  # else removed before it was locked
                return
            os.close(self.descriptor)

    def write(self, data: bytes, *, sync: bool = True) -> None:
        """Write all bytes and, with `sync`, wait until they are on the disk."""
        view = memoryview(data)
        while view:
            view = view[os.write(self.descriptor, view) :]
        if sync:
            os.fsync(self.descriptor)

    def publish(self) -> None:
        """Give the draft its name, in place of any file or link of that name.

        A device or a pipe is refused: the superuser could rename over /dev/null.
        """
        with contextlib.suppress(FileNotFoundError):
            about = os.stat(self.name, dir_fd=self.folder, follow_symlinks=False)
            if not stat.S_ISREG(about.st_mode) and not stat.S_ISLNK(about.st_mode):
                why = "found something that is not a file; it is not written to"
                raise OSError(errno.EINVAL, why)
        os.replace(self.path, self.name, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        self.path = ""

    def close(self) -> None:
        """Close the draft, and remove it if it was not published."""
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path, dir_fd=self.folder)
        os.close(self.descriptor)


def remove_drafts(path: Path, folder: int, names: Container[str] | None = None) -> None:
    """Remove the drafts that killed processes left in an opened folder, whose path is given.

    names: of the files whose drafts these are; None: of any file, also drafts of earlier versions.
    """
    with contextlib.suppress(OSError):  # a folder may not be listed
        for draft in os.listdir(path):
            match = _DRAFT.fullmatch(draft)
            if match and (names is None or (match["random"] and match["name"] in names)):
                with contextlib.suppress(OSError):
                    _remove_abandoned(draft, folder)


def _remove_abandoned(name: str, folder: int) -> None:
    descriptor = os.open(name, os.O_WRONLY | _FILE, dir_fd=folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(name, dir_fd=folder)):
            os.unlink(name, dir_fd=folder)
    finally:
        os.close(descriptor)
