"""Text of values in tables and sentences."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

# C0 but tab and line feed, DEL, C1, directions of text, ends of lines of Unicode, lone surrogates
_CONTROLS = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def printable(text: str) -> str:
    """Return a text with control characters as escapes that JSON reads; tabs and lines stay."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def one_line(text: str) -> str:
    """Return `printable` with tabs and line feeds as escapes too."""
    return printable(text).replace("\t", "\\t").replace("\n", "\\n")


def printable_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table whose texts are `printable`: names of folders may have any bytes."""
    return {key: printable(v) if isinstance(v, str) else v for key, v in row.items()}


def text(value: Any) -> str:
    """Return a value as a table cell: four significant digits, a dash for None."""
    value = plain(value)
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def distinct_texts(values: Iterable[Any]) -> dict[Any, str]:
    """Return the text of each value of a setting as a cell, exact where four digits are equal."""
    known = {scalar(value): text(scalar(value)) for value in values}
    counts = Counter(known.values())
    return {value: cell if counts[cell] == 1 else str(value) for value, cell in known.items()}


def plain(value: Any) -> Any:
    """Return a value that JSON can hold: numpy scalars as numbers, NaN as None, inf as text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def scalar(value: Any) -> Any:
    """Return the value of a setting as a table cell, lists and sections as text."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def counted(form: str, value: object) -> str:
    """Return a form with its value: `{} steps` gives `3 steps`, and `1 step`."""
    words = form.format(value)
    return words.removesuffix("s") if str(value) == "1" and form.endswith("s") else words
