"""The best values of settings that are chosen and not compared, such as a learning rate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepstack.records import Run
from deepstack.runs.settings import SEED, edge_of, one_run_per_seed, setting_value, values_of
from deepstack.runs.statistics import final_value, loss_column, mean_of


@dataclass(frozen=True)
class Choice:
    """The runs of a setting and depth with the values that were chosen.

    complete: whether all seeds of some value are done; else `runs` has all runs, values are None.
    edge: 'lowest' or 'highest' if a chosen number is the limit of those tried, or ''.
    """

    runs: list[Run]
    values: dict[str, Any]
    edge: str = ""
    complete: bool = True


def choice_of(runs: Sequence[Run], keys: Sequence[str]) -> Choice:
    """Return the runs of one setting and depth at the best values of these keys, one per seed."""
    if not keys:
        return Choice(sorted(one_run_per_seed(runs), key=lambda run: int(run.get(SEED, 0))), {})
    column = loss_column(runs)
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(values_of(run, keys), []).append(run)
    finished: dict[float, list[Run]] = {}  # by mean loss
    for members in map(one_run_per_seed, groups.values()):
        loss = mean_of([final_value(run, column) for run in members]).value
        if math.isfinite(loss) and all(run.state == "done" for run in members):
            finished.setdefault(loss, members)
    if not finished:
        return Choice(list(runs), dict.fromkeys(keys), complete=False)
    best = finished[min(finished)]
    values = {key: setting_value(best[0], key) for key in keys}
    edges = []
    for key, value in values.items():
        tried = {v for run in runs if isinstance(v := setting_value(run, key), int | float)}
        edges.append(edge_of(value, tried))
    return Choice(best, values, ", ".join(filter(None, edges)))
