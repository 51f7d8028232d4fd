"""Files of data: found by path, folder or pattern; refused in one line; read in pieces."""

import codecs
import glob
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from deepstack.base.errors import ConfigError
from deepstack.base.text import one_line

PIECE = 2**20  # bytes read at a time
MOST_TEXT = 2**31  # bytes of text, all of which is held in memory


def _is_text_encoding(name: str) -> str:
    try:
        "".encode(name)  # also refuses codecs that are not encodings of text, such as zip
    except (LookupError, UnicodeError):
        raise ValueError("unknown encoding") from None
    return codecs.lookup(name).name


Encoding = Annotated[
    str,
    Field(min_length=1, description="of text files: utf-8, latin-1, utf-16 or any that Python has"),
    AfterValidator(_is_text_encoding),
]


def refusal(reason: str, key: str = "task.path") -> ConfigError:
    """Return the error for a file that cannot be used, with the key of its path, in one line."""
    return ConfigError(f"{key}: {one_line(reason)}", key=key)


@contextmanager
def refusing(path: str, key: str = "task.path") -> Iterator[None]:
    """Turn errors of reading `path` into ConfigError, one line each."""
    try:
        yield
    except FileNotFoundError as error:
        there = "" if os.path.isabs(path) else f" (seen from {os.getcwd()})"
        allowed = "allowed a file, a folder or a pattern such as 'books/*.txt'"
        text = f"no such file or folder: {error.filename}{there}; {allowed}"
        raise refusal(text, key) from error
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        where = getattr(error, "filename", None) or path
        raise refusal(f"cannot read {where}: {reason}", key) from error


def find_files(path: str, key: str = "task.path") -> tuple[str, list[Path]]:
    """Return the name for records, never a path, and the files that `path` means, in order.

    path: a file; a folder, which means the files in it and in folders below; or a pattern such as
        `books/**/*.txt`.  Hidden files are skipped, and a folder's links to folders are not
        followed.

    Raises ConfigError, and OSError for `refusing`.
    """
    root = Path(os.path.expanduser(path))  # Path's own raises an error without a HOME
    name = os.fsencode(root.name or root.resolve().name or "/").decode("utf-8", "replace")
    if root.is_dir():
        files = _files_of(root, key)
    elif glob.has_magic(path) and not os.path.lexists(root):
        matches = map(Path, glob.glob(str(root), recursive=True))
        files = sorted((file for file in matches if not file.is_dir()), key=Path.as_posix)
        if not files:
            raise refusal(f"no file matches {path}", key)
    else:
        files = [root]
    for file in files:  # before opening: opening a FIFO waits, reading a device may never end
        if not stat.S_ISREG(file.stat().st_mode):
            raise refusal(f"{file} is not a regular file; allowed: a regular file or a folder", key)
    return name, files


def _files_of(root: Path, key: str) -> list[Path]:
    def fail(error: OSError) -> None:
        raise error

    files = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [each for each in folders if not each.startswith(".")]
        files += [Path(folder, each) for each in names if not each.startswith(".")]
    if not files:
        raise refusal(f"no files in {root} (hidden ones skipped)", key)
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def refuse_huge(path: str, files: Sequence[Path], key: str = "task.path") -> None:
    """Raise ConfigError if the files are larger together than a text held in memory may be."""
    if (size := sum(file.stat().st_size for file in files)) > MOST_TEXT:
        raise refusal(
            f"{path} has {size:,} bytes; allowed: at most {MOST_TEXT:,}, as the text is held in "
            "memory",
            key,
        )


def identity(files: Iterable[Path]) -> tuple[tuple[object, ...], ...]:
    """Return a value that changes when one of the files is written or replaced."""
    states = [(file, file.stat()) for file in files]
    return tuple((str(f), s.st_dev, s.st_ino, s.st_size, s.st_ctime_ns) for f, s in states)


def pieces(file: Path) -> Iterator[bytes]:
    """Yield the content of a file in pieces, and b"" at its end."""
    with file.open("rb") as stream:
        while piece := stream.read(PIECE):
            yield piece
    yield b""


def text_pieces(file: Path, encoding: str) -> Iterator[str]:
    """Yield the text of a file in pieces.  Raises ConfigError at a byte that is not text."""
    decoder = codecs.getincrementaldecoder(encoding)()
    count = 0
    for piece in pieces(file):
        count += len(piece)
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            at = count - len(error.object) + error.start
            wrong = f"byte {error.object[error.start]:#04x} at position {at:,}"
            named = "UTF-8" if encoding == "utf-8" else encoding
            raise refusal(
                f"{file} is not {named} text: {wrong}"
                + ("; for another encoding set task.encoding" if named == "UTF-8" else "")
            ) from error
        yield text


def sha256_of(file: Path) -> str:
    """Return the sha256 of a file in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def joint_sha256(digests: Sequence[str]) -> str:
    """Return the sha256 of one file, or of the digests of several files."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()
