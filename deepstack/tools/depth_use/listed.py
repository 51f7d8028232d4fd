"""Adds `deepstack list analyses`."""

from typing import Any

from deepstack.cli import Entries, Listing, Rows, described


def analyses() -> Entries:
    """Return the registry of analyses."""
    from deepstack.tools.depth_use.analyses import MEASURES

    return MEASURES


def rows(name: str, one: Any, depth: int | None) -> Rows:
    """Return name, description and, in the full table, the columns of an analysis."""
    from deepstack.tools.depth_use.analyses import COLUMNS

    row = described(name, one, depth)[0]
    return [row if depth is None else row | {"columns": list(COLUMNS[name])}]


LISTED = {"analyses": Listing(analyses, rows, cells={"columns": ", ".join})}
