"""Settings of single runs: their values, the order of values, and their texts."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from deepstack.base.errors import NothingMatchedError
from deepstack.config.key import DEPTH as DEPTH
from deepstack.config.key import LR as LR
from deepstack.config.key import SCHEME as SCHEME
from deepstack.config.key import SEED as SEED
from deepstack.config.key import STEPS as STEPS
from deepstack.config.key import TASK as TASK
from deepstack.config.key import WIDTH as WIDTH
from deepstack.config.key import Key
from deepstack.records import ENDED, Run, data_identity
from deepstack.runs.origin import Origin

T = TypeVar("T")
# Not a key of the config: the data of a task, which can vary like a setting.
DATA = Key("data")
MOST_NAMES = 12


def require(values: T, reason: str) -> T:
    """Return values that are not empty, or a condition that holds; else raise NothingMatchedError.

    reason: the sentence of the error.
    """
    if not values:
        raise NothingMatchedError(reason)
    return values


def depth_of(run: Run) -> int:
    return int(run.get(DEPTH, 0))


def depths_of(runs: Sequence[Run], kind: str = "runs") -> list[int]:
    """Return the depths of runs.  Raises NothingMatchedError for fewer than two."""
    depths = sorted({depth_of(run) for run in runs})
    require(len(depths) > 1, f"needs {kind} of two depths or more; all have N = {depths[0]}")
    return depths


def scheme_label(run: Run) -> str:
    """Return the scheme's name as papers write it: `DeepNorm`."""
    label = run.columns.get("scheme", {}).get("label")
    return str(label or run.get(SCHEME, "?"))


def setting_value(run: Run, key: str) -> Any:
    """Return the config value at a dotted key; for DATA the first digits of its identity.

    For an Origin it is the training before the run.
    """
    if isinstance(key, Origin):
        return key.value_of(run)
    if key == DATA:
        return (data_identity(run.meta.get("data", {})) or "")[:6] or None
    return run.flat_config.get(key)


def order_of(value: Any) -> tuple[int, float, str]:
    """Return a key that sorts None first, then numbers by size, then everything else."""
    if isinstance(value, int | float) and math.isfinite(value):
        return (1, float(value), "")
    return (0 if value is None else 2, 0.0, str(value))


def values_of(run: Run, keys: Sequence[str]) -> tuple[Any, ...]:
    """Return the values of a run at these keys, each as a key of a dict."""
    return tuple(hashable(setting_value(run, key)) for key in keys)


def hashable(value: Any) -> Any:
    """Return a config value that can be a key of a dict: lists as tuples, dicts as text."""
    if isinstance(value, dict):
        return repr(value)
    return tuple(map(hashable, value)) if isinstance(value, list) else value


def one_run_per_seed(runs: Sequence[Run]) -> list[Run]:
    """Return one run per seed: the last finished one, or else the last one.

    Runs that differ in intervals of measurements only are one sample of a mean.
    """
    ended = sorted(runs, key=lambda run: run.state in ENDED)
    return list({run.get(SEED): run for run in ended}.values())


def by_value(runs: Sequence[Run], value: Callable[[Run], Any]) -> dict[float, list[Run]]:
    """Return the runs at each value, such as a depth or a budget, one for each seed."""
    members: dict[float, list[Run]] = {}
    for run in runs:
        members.setdefault(float(value(run)), []).append(run)
    return {value: one_run_per_seed(members[value]) for value in sorted(members)}


def left_out_note(labels: Sequence[str]) -> list[str]:
    """Return a note with the names of the series that a figure leaves out."""
    names = "; ".join(labels[:MOST_NAMES])
    more = f" and {len(labels) - MOST_NAMES} more" if len(labels) > MOST_NAMES else ""
    return [f"left out: {names}{more}"] if labels else []


def evenly_spaced(values: Sequence[Any], limit: int) -> list[Any]:
    """Return at most `limit` evenly spaced values, with the first and the last."""
    if len(values) <= limit:
        return list(values)
    if limit <= 1:
        return list(values[:limit])
    picks = {round(i * (len(values) - 1) / (limit - 1)) for i in range(limit)}
    return [values[i] for i in sorted(picks)]
