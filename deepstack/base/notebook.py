"""Displays in notebooks: a progress bar that is redrawn in place, and small tables.

Plain HTML with a text form; it needs no widgets.  All texts are escaped.
"""

import sys
import time
from collections.abc import Mapping
from html import escape
from typing import Any

SECONDS = 0.2  # between two drawings
WIDTH = 24  # characters of a bar in text


def in_notebook() -> bool:
    """Return whether this process runs the cells of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")  # a terminal's IPython has none


def html_table(title: str, facts: Mapping[str, Any]) -> str:
    """Return a title and a table with one row for each named value, as HTML."""
    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(str(name))}</th>"
        f"<td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f"<b>{escape(title)}</b><table>{rows}</table>"


class ProgressBar:
    """A bar with a text in the output of a cell, redrawn at most every 0.2 seconds."""

    def __init__(self) -> None:
        self.done, self.total, self.text = 0, 0, ""
        self._handle: Any = None
        self._drawn = -SECONDS

    def show(self, done: int, total: int, text: str, *, last: bool = False) -> None:
        """Draw `done` of `total` with a text; `last` draws in any case."""
        self.done, self.total, self.text = done, total, text
        if time.monotonic() - self._drawn < SECONDS and not last:
            return
        self._drawn = time.monotonic()
        if self._handle is None:
            self._handle = sys.modules["IPython"].display.display(self, display_id=True)
        else:
            self._handle.update(self)

    def __repr__(self) -> str:
        filled = WIDTH * self.done // max(self.total, 1)
        bar = "#" * filled + "-" * (WIDTH - filled)
        return f"[{bar}] {self.done}/{self.total}  {self.text}".rstrip()

    def _repr_html_(self) -> str:
        bar = f"<progress value='{self.done}' max='{max(self.total, 1)}'></progress>"
        return f"{bar} {self.done}/{self.total} &nbsp;{escape(self.text)}"
