"""Grids of runs: a plan, one process a run, nothing done twice."""

from deepstack.sweeps.local import Local, default_workers, memory_budget
from deepstack.sweeps.plan import (
    RUN_AGAIN,
    Cell,
    expand,
    is_wanted,
    plan,
    retry_states,
    seconds_per_run,
)
from deepstack.sweeps.pool import CellProgress, Launcher, Pool
from deepstack.sweeps.run import sweep

Progress = CellProgress  # the former name

__all__ = [
    "RUN_AGAIN",
    "Cell",
    "CellProgress",
    "Launcher",
    "Local",
    "Pool",
    "Progress",
    "default_workers",
    "expand",
    "is_wanted",
    "memory_budget",
    "plan",
    "retry_states",
    "seconds_per_run",
    "sweep",
]
