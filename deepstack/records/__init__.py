"""Run folders: written atomically and locked, checked against checksums, read back."""

from deepstack.records.analyses import (
    Analysis,
    Column,
    analysis_names,
    read_analysis,
    write_analysis,
)
from deepstack.records.append_log import AppendLog, number_text
from deepstack.records.checksums import (
    CHECKSUMS,
    STATE,
    damage,
    mapping,
    sha256,
    write_checksums,
    write_end,
)
from deepstack.records.files import sync_folder, trouble
from deepstack.records.folder import (
    ENDED,
    EVALS_COLUMNS,
    STATES,
    STEPS_COLUMNS,
    TIMING_COLUMNS,
    RunFolder,
)
from deepstack.records.inspection import Inspection, folders_to_inspect, inspect, problems
from deepstack.records.labels import Labels, change_note, change_tags, read_labels
from deepstack.records.run import Run, existing_run, find_runs, varying
from deepstack.records.table import LOGGED, Summary, rows_of, run_rows, runs_table, summarize
from deepstack.records.trash import removal

__all__ = [
    "CHECKSUMS",
    "ENDED",
    "EVALS_COLUMNS",
    "LOGGED",
    "STATE",
    "STATES",
    "STEPS_COLUMNS",
    "TIMING_COLUMNS",
    "Analysis",
    "AppendLog",
    "Column",
    "Inspection",
    "Labels",
    "Run",
    "RunFolder",
    "Summary",
    "analysis_names",
    "change_note",
    "change_tags",
    "damage",
    "existing_run",
    "find_runs",
    "folders_to_inspect",
    "inspect",
    "mapping",
    "number_text",
    "problems",
    "read_analysis",
    "read_labels",
    "removal",
    "rows_of",
    "run_rows",
    "runs_table",
    "sha256",
    "summarize",
    "sync_folder",
    "trouble",
    "varying",
    "write_analysis",
    "write_checksums",
    "write_end",
]
