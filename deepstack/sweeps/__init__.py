"""Grids of runs: a plan, one process a run, nothing done twice."""

from deepstack.sweeps.local import Pool, Progress, default_workers
from deepstack.sweeps.plan import Cell, expand, plan
from deepstack.sweeps.probe import seconds_per_run
from deepstack.sweeps.run import sweep

__all__ = [
    "Cell",
    "Pool",
    "Progress",
    "default_workers",
    "expand",
    "plan",
    "seconds_per_run",
    "sweep",
]
