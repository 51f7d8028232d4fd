"""Long tables of cases: some of them in the default run, the others among the slow tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], every: int, first: int = 0) -> list[Any]:
    """The cases, of which all but each `every`-th, from the one at `first` on, are marked slow.

    Tests over one registry begin at different places, so that together they see all of it.
    A case is a tuple where a test takes several values.
    """
    return [
        case
        if at % every == first
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for at, case in enumerate(cases)
    ]
