"""Run folders: the only way results are written, and the way they are read back."""

from deepstack.records.append_log import AppendLog, number_text
from deepstack.records.files import sync_folder, trouble
from deepstack.records.folder import (
    EVALS_COLUMNS,
    STATES,
    STEPS_COLUMNS,
    TIMING_COLUMNS,
    RunFolder,
)
from deepstack.records.run import Run, find_runs, load_runs, runs_table, varying

__all__ = [
    "EVALS_COLUMNS",
    "STATES",
    "STEPS_COLUMNS",
    "TIMING_COLUMNS",
    "AppendLog",
    "Run",
    "RunFolder",
    "find_runs",
    "load_runs",
    "number_text",
    "runs_table",
    "sync_folder",
    "trouble",
    "varying",
]
