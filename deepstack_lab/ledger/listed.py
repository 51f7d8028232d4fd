"""Adds `deepstack list claims`."""

from typing import Any

from deepstack.cli import Entries, Listing, Rows
from deepstack_lab.ledger.order import order


def claims() -> Entries:
    """Return the entries of the ledger in their order."""
    from deepstack_lab.ledger.claims import CLAIMS

    return {name: CLAIMS[name] for name in sorted(CLAIMS, key=order)}


def rows(name: str, one: Any, depth: int | None) -> Rows:
    """Return id, formula and source of an entry that `deepstack reproduce` measures."""
    return [{"name": name, "formula": one.formula, "source": one.source._asdict()}]


LISTED = {"claims": Listing(claims, rows, cells={"source": lambda source: str(source["title"])})}
