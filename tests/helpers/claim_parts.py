"""Parts of claims for tests of the rule that decides them."""

from typing import Any

from deepstack_lab.ledger.claims import Null, Part

FAR = Null(100.0, "far away")


def part_of(what: str, *numbers: Any, null: Null = FAR, **more: Any) -> Part:
    """Return a part whose null result no interval reaches, unless one is given."""
    if ">=" in numbers or more.get("relation") == ">=":
        null = Null(-100.0, "far away") if null is FAR else null
    return Part(what, *numbers, null=null, **more)
