"""Describes the kinds of `deepstack list`: each is a Listing in a file listed.py.

The file stands in this package, an instrument or an integration, and is imported by the command.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from deepstack.base.extensions import PACKAGE, extension_files, import_files
from deepstack.cli.declarations import Declaration, declarations

Rows = list[dict[str, Any]]
Entries = Mapping[str, Any]


@dataclass(frozen=True)
class Listing:
    """A kind of entries that `deepstack list` prints.

    entries: a function that returns the entries by name.  Its argument tells whether torch may be
        imported; without torch an entry is the `Declaration` in the source.
    rows: a function (name, entry, depth) that returns the rows of an entry.
    json_only: the columns that only --json prints.
    cells: column -> the function that turns its nested values into a cell of a table.
    """

    entries: Callable[[bool], Entries]
    rows: Callable[[str, Any, int], Rows]
    json_only: frozenset[str] = frozenset()
    cells: Mapping[str, Callable[[Any], str]] = field(default_factory=dict)

    def table(self, *, complete: bool, depth: int = 100) -> Rows:
        """Return all rows.

        complete: also values that need torch.
        depth: the depth of coefficients of schemes.
        """
        entries = self.entries(complete)
        return [row for name, one in entries.items() for row in self.rows(name, one, depth)]

    def as_cells(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row of a table, without the columns for --json."""
        kept = {name: value for name, value in row.items() if name not in self.json_only}
        return {k: self.cells[k](v) if k in self.cells else v for k, v in kept.items()}


def registered(
    package: str, decorator: str, registry: Callable[[], Entries]
) -> Callable[[bool], Entries]:
    """Return `entries` of a Listing for definitions that register themselves.

    package, decorator: the place in the source and the kind, as in `declarations`.
    registry: a function that imports the registry.
    """
    return lambda complete: registry() if complete else declarations(package, decorator)


@cache
def listings() -> dict[str, Listing]:
    """Return every kind by name, first the kinds of the core."""
    modules = import_files([PACKAGE / "cli" / "listed.py", *extension_files("listed")])
    return {kind: one for module in modules for kind, one in module.LISTED.items()}


def document(one: Any) -> str:
    """Return the docstring of a registered object or a declaration."""
    return one.document if isinstance(one, Declaration) else inspect.getdoc(one) or ""


def first_line(one: Any) -> str:
    """Return the first line of the docstring of a registered object or a declaration."""
    return document(one).split("\n")[0]


def described(name: str, one: Any, depth: int) -> Rows:
    """Return name and description of an entry, as its one row."""
    return [{"name": name, "description": first_line(one)}]
