"""Adds `deepstack list analyses`."""

from typing import Any

from deepstack.cli import Declaration, Entries, Listing, Rows, described, registered


def analyses() -> Entries:
    """Return the registry of analyses."""
    from deepstack.tools.depth_use.analyses import MEASURES

    return MEASURES


def rows(name: str, one: Any, depth: int) -> Rows:
    """Return name, description and, with torch, the columns of an analysis."""
    row = described(name, one, depth)[0]
    if not isinstance(one, Declaration):
        from deepstack.tools.depth_use.analyses import COLUMNS

        row["columns"] = list(COLUMNS[name])
    return [row]


LISTED = {
    "analyses": Listing(
        registered("tools/depth_use/analyses", "measure", analyses),
        rows,
        cells={"columns": ", ".join},
    )
}
