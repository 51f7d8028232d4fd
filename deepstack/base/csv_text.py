"""Tables as CSV for other programs: the only place that writes it.

The logs of runs have numbers alone and a writer of their own, `deepstack.records.append_log`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepstack.base.text import printable

if TYPE_CHECKING:
    import pandas as pd

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First letters with which spreadsheets begin a formula or skip to one."""


def csv_text(table: pd.DataFrame) -> str:
    """Return a table as CSV; numbers have nine digits, and no text is a formula."""
    shown = table.apply(
        lambda column: column if column.dtype.kind in "biuf" else column.map(cell_text)
    )
    shown = shown.rename(columns=cell_text)
    return str(shown.to_csv(index=False, float_format="%.9g", lineterminator="\n"))


def cell_text(value: Any) -> Any:
    """Return a text that a spreadsheet shows as it is: with an apostrophe if it were a formula.

    Numbers stay numbers, also those in a text.
    """
    if not isinstance(value, str) or not value.startswith(FORMULA):
        return printable(value) if isinstance(value, str) else value
    try:
        float(value)
    except ValueError:
        return f"'{printable(value)}"
    return value
