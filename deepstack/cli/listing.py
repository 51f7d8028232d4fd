"""Describes the kinds of `deepstack list`: each is a Listing in a file listed.py.

The file stands in this package, an instrument or an integration, and is imported by the command.
A kind of definitions (`deepstack.base.kinds`) needs none.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import import_module
from typing import Any

from deepstack.base.extensions import PACKAGE, extension_files, import_files
from deepstack.base.kinds import KINDS
from deepstack.base.options import Option
from deepstack.cli import index

Row = dict[str, Any]
Rows = list[Row]
Entries = Mapping[str, Any]

KINDS_OF_SETTINGS = {"model.scheme": "schemes", "task.name": "tasks"}
"""Settings that name an entry of a kind, beside those that name a definition."""


@dataclass(frozen=True)
class Listing:
    """A kind of entries that `deepstack list` prints.

    entries: a function that returns the entries by name; it may import torch.
    rows: a function (name, entry, depth) that returns the rows of an entry.  depth: that of
        coefficients of schemes; None: the rows of the short table.
    in_index: whether the short table stands in the index.
    json_only: the columns that only --json prints.
    cells: column -> the function that turns its nested values into a cell of a table.
    """

    entries: Callable[[], Entries]
    rows: Callable[[str, Any, int | None], Rows]
    in_index: bool = True
    json_only: frozenset[str] = frozenset()
    cells: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)

    def table(self, depth: int | None = None) -> Rows:
        """Return all rows of the imported entries; without a depth, the short table."""
        entries = self.entries().items()
        return [row for name, one in entries for row in self.rows(name, one, depth)]

    def as_cells(self, row: Mapping[str, Any]) -> Row:
        """Return a row of a table, without the columns for --json."""
        kept = {name: value for name, value in row.items() if name not in self.json_only}
        return {k: self.cells[k](v) if k in self.cells else v for k, v in kept.items()}


@cache
def listings() -> dict[str, Listing]:
    """Return every kind by name: those of the core, of definitions, and of additions."""
    modules = import_files([PACKAGE / "cli" / "listed.py", *extension_files("listed")])
    core, *added = [module.LISTED for module in modules]
    kinds = {kind: definitions(key) for key, kind in definition_kinds().items()}
    return {**core, **kinds, **{kind: one for each in added for kind, one in each.items()}}


def short_table(kind: str) -> Rows:
    """Return the rows of a kind in the index; if that is stale, of the imported registry."""
    return index.rows(kind) if index.is_fresh() else listings()[kind].table()


def names_of(kind: str) -> list[str]:
    """Return the names of the entries of a kind in the index."""
    return list(dict.fromkeys(row["name"] for row in short_table(kind)))


def definition_kinds() -> dict[str, str]:
    """Return the kinds of definitions: setting -> kind of `deepstack list`."""
    if index.is_fresh():
        return {row["key"]: row["name"] for row in index.rows(index.KINDS)}
    import_kinds()
    return {key: f"{kind.kind}s" for key, kind in sorted(KINDS.items())}


def names_of_setting(key: str) -> list[str]:
    """Return the names that a setting may have if it names an entry of a kind, else []."""
    kind = KINDS_OF_SETTINGS.get(key) or definition_kinds().get(key)
    return names_of(kind) if kind else []


def definitions(key: str) -> Listing:
    """Return the listing of the definitions that a setting names: schedules, optimizers, …"""
    entries = partial(imported_kind, key)
    return Listing(entries, definition_rows, cells={"options": words_of_options})


def imported_kind(key: str) -> Entries:
    """Return the registry of the definitions that a setting names."""
    import_kinds()
    return KINDS[key]


def import_kinds() -> None:
    """Import the modules that register kinds of definitions; this imports torch."""
    import_module("deepstack.training")


def definition_rows(name: str, one: Any, depth: int | None) -> Rows:
    """Return name, first sentence and options of a definition."""
    options = [option_row(key, option) for key, option in one.options.items()]
    return [{"name": name, "description": one.equation(), "options": options}]


def option_row(name: str, option: Option) -> Row:
    """Return name, type, default and description of an option."""
    usual = option.default
    default = list(usual) if isinstance(usual, tuple) else usual
    row = {"name": name, "type": option.type, "default": default}
    return row | {"description": option.description}


def words_of_options(options: Rows) -> str:
    """Return options as a cell."""
    return ", ".join(f"{option['name']}={option['default']}" for option in options)


def first_line(one: Any) -> str:
    """Return the first line of the docstring of a registered object."""
    return (inspect.getdoc(one) or "").split("\n")[0]


def described(name: str, one: Any, depth: int | None) -> Rows:
    """Return name and description of an entry, as its one row."""
    return [{"name": name, "description": first_line(one)}]
