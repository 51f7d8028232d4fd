"""Cells: the ended runs of one setting at one depth, by the value of a chosen setting and seed.

Every choice of a best value, every margin and every count of seeds that learn reads cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepstack.records import Run
from deepstack.runs.outcomes import Result
from deepstack.runs.series import Series
from deepstack.runs.settings import LR, by_value, require

BySeed = Mapping[int, Result]


@dataclass(frozen=True)
class Cell:
    """The runs of one setting at one depth.

    label: the setting: values that vary, apart from depth, seed and the chosen settings.
    tried: value of the chosen settings -> seed -> result, of ended runs: the learning rate, or for
        several chosen settings the tuple of their values, or () for none.
    unfinished: the same of the other runs.
    keys: the chosen settings.
    """

    label: str
    depth: int
    tried: Mapping[Any, BySeed]
    unfinished: Mapping[Any, BySeed]
    keys: Sequence[str] = (LR,)


def rate_of(result: Result) -> float:
    """Return the learning rate of a run, the setting that is chosen by default."""
    return result.rate


def cells_of(
    results: Iterable[Result],
    value: Callable[[Result], Any] = rate_of,
    keys: Sequence[str] = (LR,),
) -> list[Cell]:
    """Return the cells of these results: settings in order of appearance, then rising depths.

    A run has ended with a result if it diverged, or is done and has a loss.  Of several runs of one
    value and seed the last one counts.

    keys, value: the chosen settings, and their value of a run.
    """
    cells: dict[tuple[str, int], Cell] = {}
    order: dict[str, int] = {}
    for one in results:
        order.setdefault(one.setting, len(order))
        cell = cells.setdefault(
            (one.setting, one.depth), Cell(one.setting, one.depth, {}, {}, tuple(keys))
        )
        of_value: Any = cell.tried if has_result(one) else cell.unfinished
        of_value.setdefault(value(one), {})[one.seed] = one
    return [cells[at] for at in sorted(cells, key=lambda at: (order[at[0]], at[1]))]


def has_result(one: Result) -> bool:
    """Return whether a run has ended so that it counts: diverged, or done with a loss."""
    return bool(one.outcome) or (one.state == "done" and one.loss is not None)


def runs_by_rate(every: Sequence[Series]) -> dict[tuple[Series, int], dict[float, list[Run]]]:
    """Return the runs of each series and depth at each learning rate, one for each seed.

    Raises NothingMatchedError if no series and depth has two rates.
    """
    cells = {
        (s, n): by_value(
            [run for run in s.everything_at(n) if run.get(LR) is not None],
            lambda run: run.get(LR),
        )
        for s in every
        for n in s.depths
    }
    several = max(map(len, cells.values())) > 1
    require(several, "needs finished runs of two learning rates at one depth")
    return cells
