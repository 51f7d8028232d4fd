"""Adds `deepstack list claims`."""

from typing import Any

from deepstack.cli import Declaration, Entries, Listing, Rows, document, registered
from deepstack_lab.ledger.order import order


def claims() -> Entries:
    """Return the registry of claims."""
    from deepstack_lab.ledger.claims import CLAIMS

    return CLAIMS


def in_order(complete: bool) -> Entries:
    """Return the entries in their order."""
    entries = registered("deepstack_lab/ledger/claims", "claim", claims)(complete)
    return {name: entries[name] for name in sorted(entries, key=order)}


def rows(name: str, one: Any, depth: int) -> Rows:
    """Return id, formula and source of an entry that `deepstack reproduce` measures."""
    if isinstance(one, Declaration):
        formula = document(one).split("\n\n")[0].replace("\n", " ").rstrip(".")
        source = {"title": one.arguments[0][0]}  # a paper's address is made of its number
    else:
        formula, source = one.formula, one.source._asdict()
    return [{"name": name, "formula": formula, "source": source}]


LISTED = {"claims": Listing(in_order, rows, cells={"source": lambda source: str(source["title"])})}
