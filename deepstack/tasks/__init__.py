"""Tasks: the data that a stack learns to predict. Each is one function that returns a `Task`."""

from deepstack.base.registry import import_all
from deepstack.tasks.task import (
    IGNORE,
    PIECE,
    TASKS,
    Batch,
    Task,
    build_task,
    task,
    task_families,
    task_of,
    task_options,
)

__all__ = [
    "IGNORE",
    "PIECE",
    "TASKS",
    "Batch",
    "Task",
    "build_task",
    "task",
    "task_families",
    "task_of",
    "task_options",
]

# A task registers itself when its module is imported.
import_all(__name__, __path__)
