"""Long tables of cases: some of them in the default run, the others among the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], every: int) -> list[Any]:
    """The cases, of which all but each `every`-th, the first included, are marked slow."""
    return [
        case if at % every == 0 else pytest.param(case, marks=pytest.mark.slow)
        for at, case in enumerate(cases)
    ]
