"""Grids of runs: a plan, one process a run, nothing done twice."""

from deepstack.sweeps.launcher import Launcher
from deepstack.sweeps.local import Local, default_workers
from deepstack.sweeps.plan import Cell, expand, plan
from deepstack.sweeps.pool import Pool, Progress
from deepstack.sweeps.probe import seconds_per_run
from deepstack.sweeps.run import sweep

__all__ = [
    "Cell",
    "Launcher",
    "Local",
    "Pool",
    "Progress",
    "default_workers",
    "expand",
    "plan",
    "seconds_per_run",
    "sweep",
]
