"""Files and outputs that pages of the documentation show below a title."""

import re

from helpers import ROOT


def shown(page: str, title: str) -> str:
    """Return the content of the block of a page in docs with this title."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    (found,) = re.findall(rf'```\w+ title="{re.escape(title)}"\n(.*?)```', text, re.DOTALL)
    return str(found)


def without_numbers(text: str) -> str:
    """Return a text whose numbers, but for powers and names, may differ by version and machine."""
    return re.sub(r"(?<![\w^])\d[\d.]*(e[-+]?\d+)?", "#", text.replace("deepstack: ", "")).strip()
