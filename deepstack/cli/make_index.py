"""Makes the index from the registries: python -m deepstack.cli.make_index (`make fix`)."""

import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from deepstack.base.extensions import ROOT
from deepstack.base.kinds import KINDS
from deepstack.cli import index
from deepstack.cli.commands import command_files, described_in
from deepstack.cli.index import Entry, Index
from deepstack.cli.listing import Listing, import_kinds, listings
from deepstack.records.files import replace

PACKAGES = ("deepstack", "deepstack_lab")


def fresh() -> Index:
    """Return the index of the source as it is, from the registries."""
    known = listings()
    kinds = [index.KINDS, *(kind for kind, one in known.items() if one.in_index)]
    entries = [*command_entries(), *(one for kind in sorted(kinds) for one in entries_of(kind))]
    files = {one.file for one in entries} | {*command_files()}
    files |= {file for kind in kinds for file in sources(known.get(kind))}
    folders = {folder_of(one.file) for one in entries if one.kind != index.COMMANDS}
    return Index(
        {
            folder: index.names_checksum(ROOT / folder)
            for folder in sorted(folders | {*index.additions()})
        },
        {file: index.checksum(ROOT / file) for file in sorted(files)},
        entries,
    )


def entries_of(kind: str) -> list[Entry]:
    """Return the entries of a kind from its registry; this imports torch."""
    if kind == index.KINDS:
        import_kinds()
        plurals = {f"{one.kind}s": one for one in KINDS.values()}
        return [
            Entry(kind, file_of(one.base), {"name": name, "key": one.key})
            for name, one in sorted(plurals.items())
        ]
    listing = listings()[kind]
    return [
        Entry(kind, file_of(one), row)
        for name, one in listing.entries().items()
        for row in listing.rows(name, one, None)
    ]


def command_entries() -> list[Entry]:
    """Return the entries of the commands."""
    return [
        Entry(index.COMMANDS, file, vars(one))
        for file in command_files()
        for one in described_in(file)
    ]


def sources(listing: Listing | None) -> set[str]:
    """Return the files, beside those of entries, on which the rows of a listing depend.

    They hold the bases of the entries' classes, and the function that makes the rows.
    """
    if listing is None:
        return set()
    bases = {base for one in listing.entries().values() for base in inspect.getmro(type_of(one))}
    modules = {base.__module__ for base in bases} | {listing.rows.__module__}
    return {file_of_module(name) for name in modules if name.split(".")[0] in PACKAGES}


def type_of(one: Any) -> type:
    """Return a class itself, else the class of an object."""
    return one if isinstance(one, type) else type(one)


def file_of(one: Any) -> str:
    """Return the file that defines a registered object, below ROOT."""
    one = getattr(one, "experiment", one)  # of a claim
    return file_of_module(getattr(one, "module", None) or one.__module__)


def file_of_module(name: str) -> str:
    """Return the file of an imported module, below ROOT."""
    return PurePath(str(sys.modules[name].__file__)).relative_to(ROOT).as_posix()


def folder_of(file: str) -> str:
    """Return the addition or the package of the core of a file."""
    added = [one for one in index.additions() if file.startswith(f"{one}/")]
    return (added or ["/".join(file.split("/")[:2])])[0]


def text_of(made: Index) -> str:
    """Return the text of the index: JSON with one entry a line."""
    parts = [
        '"folders": {\n' + lines(f"{json.dumps(k)}: {v}" for k, v in made.folders.items()) + "\n}",
        '"files": {\n' + lines(f"{json.dumps(k)}: {v}" for k, v in made.files.items()) + "\n}",
        '"entries": [\n'
        + lines(json.dumps(one, ensure_ascii=False) for one in made.entries)
        + "\n]",
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def lines(values: Iterable[str]) -> str:
    """Return JSON values, one a line."""
    return ",\n".join(values)


if __name__ == "__main__":
    replace(index.FILE, text_of(fresh()).encode())
