"""Grids of runs: a plan, one process a run, nothing done twice."""

from deepstack.sweeps.launcher import Launcher
from deepstack.sweeps.local import Local, default_workers, most_threads, room_here
from deepstack.sweeps.plan import (
    FINISHED,
    RUN_AGAIN,
    Cell,
    expand,
    is_wanted,
    plan,
    retry_states,
)
from deepstack.sweeps.pool import Pool, Progress
from deepstack.sweeps.probe import seconds_per_run
from deepstack.sweeps.room import Room, memory_budget
from deepstack.sweeps.run import sweep

__all__ = [
    "FINISHED",
    "RUN_AGAIN",
    "Cell",
    "Launcher",
    "Local",
    "Pool",
    "Progress",
    "Room",
    "default_workers",
    "expand",
    "is_wanted",
    "memory_budget",
    "most_threads",
    "plan",
    "retry_states",
    "room_here",
    "seconds_per_run",
    "sweep",
]
