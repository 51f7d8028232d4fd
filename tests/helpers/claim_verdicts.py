"""The published verdict of every claim: that of docs/claims.md."""

from __future__ import annotations

import re

from helpers import ROOT

PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")


def verdict_of(section: str) -> tuple[str, list[str]]:
    """The verdict of a claim, and the names of its stated parts that disagree, from its section."""
    (verdict,) = re.findall(r"^`.*`: \*\*(.*)\*\*\.$", section, re.M)
    rows = [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return verdict, [cells[0] for cells in rows if cells[-1] == "disagrees"]


PUBLISHED = {s.split("\n")[0]: verdict_of(s) for s in re.split(r"^## ", PAGE, flags=re.M)[1:]}
