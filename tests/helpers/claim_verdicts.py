"""The published verdict and numbers of every claim: those of docs/claims.md."""

import re

from helpers import ROOT

PAGE = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")


def published(section: str) -> tuple[str, list[list[str]]]:
    """The verdict of a claim, and the cells of the rows of its table, from its section."""
    (verdict,) = re.findall(r"^`.*`: \*\*(.*)\*\*\.$", section, re.M)
    rows = [line[2:-2].split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return verdict, rows[2:]  # without the head


PUBLISHED = {s.split("\n")[0]: published(s) for s in re.split(r"^## ", PAGE, flags=re.M)[1:]}
