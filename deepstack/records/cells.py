"""A value as a cell of a table."""

from __future__ import annotations

import math
from typing import Any


def text(value: Any) -> str:
    """A value as a cell: four significant digits, a dash for nothing."""
    value = plain(value)
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def plain(value: Any) -> Any:
    """A value as JSON has it: numpy scalars as numbers, NaN as None, infinities as words."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
