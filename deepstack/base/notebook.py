"""Notebooks: whether this process runs one, and small tables in HTML.  All texts are escaped."""

import sys
from collections.abc import Mapping
from html import escape
from typing import Any


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
