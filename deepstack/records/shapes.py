"""The types of values in the JSON files of a run folder, and the range of their numbers.

Readers rely on them.  A file with another value is damaged, or was not written by deepstack.
"""

from collections.abc import Mapping
from typing import Any

# A number beyond this overflows once readers multiply or square it.
LARGEST = 1e30


class Number:
    """A finite number between -LARGEST and LARGEST, or from 0 on."""

    def __init__(self, least: float = -LARGEST) -> None:
        self.least = least

    def fits(self, value: object) -> bool:
        """Return whether a value is such a number."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return self.least <= value <= LARGEST  # NaN is not


class Count(Number):
    """A whole number from 0 on."""

    def __init__(self) -> None:
        super().__init__(0)

    def fits(self, value: object) -> bool:
        """Return whether a value is such a number."""
        return isinstance(value, int) and super().fits(value)


ANY = "*"  # the key in a shape that matches every key
ENTRIES = {ANY: {"symbol": str, "unit": str, "description": str}}

META: dict[str, Any] = {
    "command": str,
    "created": str,
    "environment": {},
    "environment_changed": bool,
    "git": {},
    "parameters": {ANY: Number(0)},
    "flops": {ANY: Number(0)},
    "data": {"name": str, "sha256": str, "held_out": {}, "times_read": Number(0)},
    "validation": {ANY: Count()},
    "start": {},
    "extends": {},
    "references": {ANY: Number()},
    "plugins": [{"file": str, "sha256": str}],
    "resumed": [{}],
    "differing_logs": [str],
}
STATUS: dict[str, Any] = {
    "state": str,
    "step": Count(),
    "error": (str, type(None)),
    "checksums": str,
    "phase": str,
}
COLUMNS: dict[str, Any] = {
    "columns": ENTRIES,
    "layers": ENTRIES,
    "attribution": ENTRIES,
    "scheme": {
        "name": str,
        "label": str,
        "equation": str,
        "paper": (str, type(None)),
        "normalised": bool,
    },
    "defaults": {},
    "stacks": {ANY: Count()},
    "f0_norm": Number(0),
    "references": {ANY: Number()},
    "below_fp32_resolution": {ANY: Count()},
}


def mismatch(value: object, shape: Any, name: str = "") -> str | None:
    """Return the first value that has not the type of a shape, as 'flops.step: found "x"', or None.

    shape: a type, several types, a Number, a list with the shape of its items, or a mapping with
        the shapes of its values.  Other keys are not checked, and no key is required.
    """
    if isinstance(shape, Number):
        fits = shape.fits(value)
    elif isinstance(shape, (dict, list)):
        fits = isinstance(value, type(shape))
    else:
        fits = isinstance(value, shape)
    if not fits:
        text = repr(value)
        return f"found {text if len(text) < 60 else type(value).__name__} as {name}"
    if isinstance(value, Mapping):
        for key, item in value.items():
            if (inner := shape.get(key, shape.get(ANY))) is not None:
                if problem := mismatch(item, inner, f"{name}.{key}".lstrip(".")):
                    return problem
    elif isinstance(value, list):
        for number, item in enumerate(value):
            if problem := mismatch(item, shape[0], f"{name}[{number}]"):
                return problem
    return None
