"""Reads and replaces files: atomically, through no link of somebody else."""

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from deepstack.base.errors import ResourceError
from deepstack.records import opened
from deepstack.records.published import refuse_published

CHECKSUMS = "checksums.json"

# Bytes of a JSON or YAML file, which is read as a whole.
LARGEST_TEXT = 2**26

# Bytes up to which a file may be full of holes.
LARGEST_HOLE = 2**28

# Errors that more space on the disk may cure; libraries such as safetensors give no number.
_OF_SPACE = (None, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)


@contextlib.contextmanager
def trouble(path: Path) -> Iterator[None]:
    """Turn an OSError into a ResourceError with path, cause and, where it matters, free space.

    Required by the planted fault error_of_the_disk_not_translated.
    """
    try:
        yield
    except OSError as error:
        space = ""
        if error.errno in _OF_SPACE:
            with contextlib.suppress(OSError, StopIteration):
                there = next(folder for folder in (path, *path.parents) if folder.is_dir())
                space = f" ({shutil.disk_usage(there).free / 1e6:.0f} MB free)"
        raise ResourceError(f"{path}: {error.strerror or error}{space}") from error


def read(path: Path, largest: float = math.inf) -> bytes | None:
    """Return the bytes of a file; None if there is none.

    Raises ResourceError, without waiting, for a folder, a pipe, a device, or more than `largest`
    bytes.
    """
    with trouble(path), contextlib.suppress(FileNotFoundError), open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > largest:
            raise ResourceError(f"{path}: found {size:,} bytes; allowed at most {largest:,}")
        return file.read()
    return None


def parse_object(data: bytes, *, constants: bool = False) -> dict[str, Any]:
    """Return the JSON object that these bytes hold; raises ValueError for anything else.

    constants: whether NaN and Infinity are allowed, which Python writes.
    """
    try:
        value = json.loads(data, parse_constant=None if constants else _refuse_constant)
    except RecursionError:
        raise ValueError("is too deeply nested") from None
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def _refuse_constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"found {name}")


def mapping(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises OSError if it is not a regular file or is too large, ValueError if it is not an object.
    """
    return parse_object(plain_file(path, LARGEST_TEXT).read_bytes())


def sha256(path: Path) -> str:
    """Return the sha256 of a file in hexadecimal."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def plain_file(path: Path, largest: int | None = None) -> Path:
    """Return the path of a regular file of at most `largest` bytes; raises OSError otherwise."""
    about = path.lstat()
    if not stat.S_ISREG(about.st_mode):
        raise OSError(f"{path.name} is not a file")
    if largest is not None and about.st_size > largest:
        raise OSError(f"{path.name} has {about.st_size:,} bytes, of {largest:,} at most")
    return path


def open_file(path: Path) -> BufferedReader:
    """Open a file to read it; raises OSError, and ResourceError if it is not a regular file."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    about = os.fstat(file.fileno())
    if not stat.S_ISREG(about.st_mode):
        file.close()
        raise ResourceError(f"{path}: found something that is not a file; it is not read")
    if about.st_size > LARGEST_HOLE and is_hollow(file.fileno(), about):
        file.close()
        raise ResourceError(
            f"{path}: found {about.st_size:,} bytes, of which the disk holds "
            f"{512 * about.st_blocks:,}; deepstack writes no such file, and it is not read"
        )
    return file


def is_hollow(descriptor: int, about: os.stat_result) -> bool:
    """Return whether the disk holds less than a hundredth of an open file's bytes.

    Reading it could take for ever.  No log and no weights can be compressed so far.
    """
    if about.st_blocks:
        return 100 * 512 * about.st_blocks < about.st_size
    try:  # some file systems do not count blocks
        os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError as error:
        return error.errno == errno.ENXIO
    os.lseek(descriptor, 0, os.SEEK_SET)
    return False


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable.

    Does nothing on network file systems that cannot, and for a folder that may not be listed.
    Required by the planted fault new_folders_not_synced.
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


def remove_drafts(folders: Iterable[Path]) -> None:
    """Remove the drafts of killed processes, and leave the drafts of living ones."""
    for folder in folders:
        with contextlib.suppress(OSError), opened.open_folder(folder) as descriptor:
            opened.remove_drafts(folder, descriptor)


def remove_hidden_folders(parent: Path, pattern: str = ".*") -> None:
    """Remove the folders in a folder that killed processes left: their names begin with a dot."""
    for left in parent.glob(pattern):
        if left.is_dir() and not left.is_symlink():  # rmtree would wait for a pipe
            shutil.rmtree(left, ignore_errors=True)


def refuse_links(folder: Path, below: Sequence[str]) -> None:
    """Raise ResourceError if a folder, or a folder `below` it, holds a link or a special file.

    Writing to a link would change another file, writing to a pipe would block.  Required by
    test_a_link_in_a_run_folder_is_not_written_through and
    test_pipes_in_a_run_folder_block_no_command.
    """
    for path in (folder, *(folder / name for name in below)):
        if not path.is_dir():
            continue
        with os.scandir(path) as entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                if not is_folder and not entry.is_file(follow_symlinks=False):
                    kind = "a link" if entry.is_symlink() else "not a file"
                    raise ResourceError(
                        f"{entry.path} is {kind}, and training would write to it; put a file or "
                        "folder of its own there, or move it away"
                    )


def refuse_links_below(folder: Path) -> None:
    """Raise ResourceError if a folder, at any depth, holds a link or a special file."""
    for place, _, _ in os.walk(folder):
        refuse_links(Path(place), ())


def make_folder(path: Path, below: Path | None = None) -> list[Path]:
    """Make a folder and its missing parents durable; return the new ones.

    below: a folder above, from which on no link is followed.
    """
    base = below or path
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    base.mkdir(parents=True, exist_ok=True)
    with opened.open_folder(path, below, make=True):
        for folder in new:
            sync_folder(folder.parent)
    return new


def replace(path: Path, data: bytes, below: Path | None = None) -> None:
    """Replace a file atomically (draft, sync, rename, sync): readers see the old or the new one.

    below: as of `replace_all`.

    Raises ResourceError when the disk refuses; the old file is then unharmed.
    """
    replace_all(path.parent, [(path.name, data)], below)


def replace_all(
    folder: Path,
    contents: Iterable[tuple[str, bytes]],
    below: Path | None = None,
    *,
    sync: bool = True,
) -> None:
    """`replace` several files (name, data) of one folder; each is old or new at any moment.

    Syncs the folder once, which takes half as long as once for each file.

    below: a folder above, from which on no link is followed (default: the folder itself).
    sync: whether the files are on the disk afterwards; without, a power cut may damage them.

    Required by the planted faults replaced_in_place and replaced_without_a_sync.
    """
    refuse_published(folder)
    drafts: list[opened.Draft] = []
    with contextlib.ExitStack() as stack:
        with trouble(folder):
            make_folder(folder, below)
            descriptor = stack.enter_context(opened.open_folder(folder, below))
        for name, data in contents:
            with trouble(folder / name):
                drafts.append(opened.Draft(name, descriptor))
                stack.callback(drafts[-1].close)
                drafts[-1].write(data, sync=sync)
        for draft in drafts:
            with trouble(folder / draft.name):
                draft.publish()
        if sync:
            with trouble(folder):
                sync_folder(folder)
        opened.remove_drafts(folder, descriptor, {draft.name for draft in drafts})


def open_log(path: Path) -> FileIO:
    """Open a file to append to it; raises OSError for a link, a pipe and a hard link."""
    with opened.open_folder(path.parent) as folder:
        descriptor = opened.open_regular(path.name, folder, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    return FileIO(descriptor, "ab")


def rewrite_end(path: Path, size: int, data: bytes = b"", below: Path | None = None) -> None:
    """Keep the first `size` bytes of a file and write `data` after them."""
    with trouble(path):
        with opened.open_folder(path.parent, below) as folder:
            file = FileIO(opened.open_regular(path.name, folder, os.O_WRONLY), "wb")
        with file:
            file.truncate(size)
            file.seek(size)
            while data:
                data = data[file.write(data) :]
