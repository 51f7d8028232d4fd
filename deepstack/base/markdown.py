"""Markdown: the only place that writes it.  Texts are escaped."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from deepstack.base.text import printable

# Letters that Markdown or pandoc reads as signs where they stand; code spans stay code spans.
SIGNS = re.compile(r"[\\`|\[\]$]|\*(?=\S)|(?<!\w)_(?=\S)|~(?=~)|(?<=~)~|&(?=#?\w+;)|(?<!\w)@(?=\w)")
TAG = re.compile(r"<(?=[A-Za-z/!?])")
SPAN = re.compile(r"(`[^`]+`)")
BLOCK = re.compile(r"^(?=[-+=>#])|^(\d+)(?=[.)])")  # the begin of a list, a heading or a quotation


def escaped(text: str) -> str:
    """Return a text in one line, in which no letter is a sign of Markdown but those of `code`."""
    parts = SPAN.split(printable(" ".join(text.split("\n"))))
    parts[::2] = [TAG.sub("&lt;", SIGNS.sub(r"\\\g<0>", part)) for part in parts[::2]]
    parts[1::2] = [part.replace("|", "\\|") for part in parts[1::2]]
    return "".join(parts)


def paragraph(text: str) -> str:
    """Return a text that begins no list, heading or quotation either."""
    return BLOCK.sub(lambda found: f"{found[1]}\\" if found[1] else "\\", escaped(text))


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as a table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [list(map(escaped, names)), ["---"] * len(names)]
    lines += [[escaped(row.get(name, "")) for name in names] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code(lines: Sequence[str], language: str = "") -> str:
    """Return a block of code; its fence is longer than any in the lines."""
    text = printable("\n".join(lines))
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{fence}{language}\n{text}\n{fence}"
