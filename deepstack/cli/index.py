"""The index: the entries that `deepstack list`, help and completion show, read without torch.

`make fix` writes index.json (`deepstack.cli.make_index`).  An entry counts while its file exists,
so a deleted folder takes its entries with it.  The index is stale if a file on which entries depend
has other bytes, or if a folder that holds entries has other files: then the registries are
imported (`deepstack.cli.listing`), which takes a second longer.
"""

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from deepstack.base.extensions import HOMES, PACKAGE, ROOT

Row = dict[str, Any]

FILE = PACKAGE / "index.json"
COMMANDS, KINDS = "commands", "kinds"
"""Kinds of entries that `deepstack list` does not print: commands, and kinds of definitions."""


class Entry(NamedTuple):
    """An entry of the index.

    kind: of `deepstack list`, COMMANDS or KINDS.
    file: path of the file that defines it, below ROOT.
    row: the row that `deepstack list` prints, or the fields of a command or a kind.
    """

    kind: str
    file: str
    row: Row


class Index(NamedTuple):
    """The entries, and the fingerprint of the source from which they were made.

    folders: folder -> checksum of the names of its Python files.
    files: file -> checksum of its bytes.
    """

    folders: Mapping[str, int]
    files: Mapping[str, int]
    entries: list[Entry]


@cache
def stored() -> Index:
    """Return the stored index; an empty one, which is stale, if there is none."""
    try:
        content = json.loads(FILE.read_text(encoding="utf-8"))
        return Index(
            content["folders"], content["files"], [Entry(*one) for one in content["entries"]]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return Index({}, {}, [])


def rows(kind: str) -> list[Row]:
    """Return the stored entries of a kind whose files exist, in their order."""
    return [one.row for one in stored().entries if one.kind == kind and exists(one.file)]


@cache
def is_fresh() -> bool:
    """Return whether the entries of registries are those of the source as it is.

    Folders of additions may be missing; each one that exists must be known.
    """
    index = stored()
    return (
        bool(index.folders)
        and set(additions()) <= index.folders.keys()
        and all(
            names_checksum(ROOT / folder) == number
            for folder, number in index.folders.items()
            if (ROOT / folder).is_dir() or not folder.startswith(HOMES)
        )
        and all(is_unchanged(file) for file in index.files if exists(file))
    )


def is_unchanged(file: str) -> bool:
    """Return whether a file has the bytes from which the index was made."""
    return stored().files.get(file) == checksum(ROOT / file)


@cache
def exists(file: str) -> bool:
    """Return whether a file below ROOT exists."""
    return (ROOT / file).is_file()


def additions() -> list[str]:
    """Return the folders of additions that exist, below ROOT."""
    paths = (path.parent for home in HOMES for path in ROOT.glob(f"{home}/*/__init__.py"))
    return [path.relative_to(ROOT).as_posix() for path in paths]


@cache
def checksum(path: Path) -> int:
    """Return the checksum of a file's bytes."""
    return crc32(path.read_bytes())


def names_checksum(folder: Path) -> int:
    """Return the checksum of the names of the Python files below a folder."""
    found = [
        os.path.relpath(os.path.join(place, name), folder)
        for place, _, names in os.walk(folder)
        for name in names
        if name.endswith(".py")
    ]
    return crc32("\n".join(sorted(found)).encode())
