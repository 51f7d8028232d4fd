"""The command line, with one file for each command.

What commands of tools import stands in the block below, and is imported when it is first used:
`deepstack --help` needs little of it.
"""

from typing import TYPE_CHECKING

from deepstack.base import lazy_face
from deepstack.base.ending import one_line_endings

with one_line_endings():  # an interrupt or a lack of memory may come during the imports
    from deepstack.cli.app import Command as Command
    from deepstack.cli.app import app as app
    from deepstack.cli.app import main as main
    from deepstack.cli.app import reported_errors as reported_errors

if TYPE_CHECKING:
    from deepstack.cli import options as options
    from deepstack.cli.added_options import CompareTable as CompareTable
    from deepstack.cli.added_options import LauncherOption as LauncherOption
    from deepstack.cli.added_options import SweepOption as SweepOption
    from deepstack.cli.added_options import SweepOrder as SweepOrder
    from deepstack.cli.added_options import Training as Training
    from deepstack.cli.commands import command as command
    from deepstack.cli.completion import complete_names as complete_names
    from deepstack.cli.listing import Entries as Entries
    from deepstack.cli.listing import Listing as Listing
    from deepstack.cli.listing import Rows as Rows
    from deepstack.cli.listing import described as described
    from deepstack.cli.options import Folders as Folders
    from deepstack.cli.options import Json as Json
    from deepstack.cli.options import Last as Last
    from deepstack.cli.options import Markdown as Markdown
    from deepstack.cli.options import Plugins as Plugins
    from deepstack.cli.options import RunPath as RunPath
    from deepstack.cli.options import Where as Where
    from deepstack.cli.options import command_line as command_line
    from deepstack.cli.options import flag as flag
    from deepstack.cli.options import load_plugins as load_plugins
    from deepstack.cli.options import option as option
    from deepstack.cli.options import whole_numbers as whole_numbers
    from deepstack.cli.output import emit as emit
    from deepstack.cli.output import emit_facts as emit_facts
    from deepstack.cli.output import emit_json as emit_json
    from deepstack.cli.output import is_interactive as is_interactive
    from deepstack.cli.output import log as log
    from deepstack.cli.output import log_figures as log_figures
    from deepstack.cli.output import show_runs as show_runs
    from deepstack.cli.output import show_work as show_work
    from deepstack.cli.output import study_rows as study_rows
    from deepstack.cli.output import terminal_width as terminal_width
    from deepstack.cli.run_table import RunRow as RunRow
    from deepstack.cli.run_table import counts as counts
    from deepstack.cli.run_table import last_evaluation as last_evaluation
    from deepstack.cli.run_watcher import RunWatcher as RunWatcher
    from deepstack.cli.run_watcher import time_and_size as time_and_size
    from deepstack.cli.several_studies import rows_of_studies as rows_of_studies
    from deepstack.cli.several_studies import studies_below as studies_below
    from deepstack.cli.signals import ended_by_ctrl_c as ended_by_ctrl_c
    from deepstack.cli.study_kinds import StudyKind as StudyKind
    from deepstack.cli.sweep_training import SweepTraining as SweepTraining
    from deepstack.cli.sweep_training import of_other_sweeps as of_other_sweeps
    from deepstack.cli.table import lay_out as lay_out

FACE = {  # module -> names; a test compares them with the block above
    "added_options": (
        "CompareTable",
        "LauncherOption",
        "SweepOption",
        "SweepOrder",
        "Training",
    ),
    "commands": ("command",),
    "completion": ("complete_names",),
    "listing": (
        "Entries",
        "Listing",
        "Rows",
        "described",
    ),
    "options": (
        "Folders",
        "Json",
        "Last",
        "Markdown",
        "Plugins",
        "RunPath",
        "Where",
        "command_line",
        "flag",
        "load_plugins",
        "option",
        "whole_numbers",
    ),
    "output": (
        "emit",
        "emit_facts",
        "emit_json",
        "is_interactive",
        "log",
        "log_figures",
        "show_runs",
        "show_work",
        "study_rows",
        "terminal_width",
    ),
    "run_table": (
        "RunRow",
        "counts",
        "last_evaluation",
    ),
    "run_watcher": (
        "RunWatcher",
        "time_and_size",
    ),
    "several_studies": (
        "rows_of_studies",
        "studies_below",
    ),
    "signals": ("ended_by_ctrl_c",),
    "study_kinds": ("StudyKind",),
    "sweep_training": (
        "SweepTraining",
        "of_other_sweeps",
    ),
    "table": ("lay_out",),
}

if not TYPE_CHECKING:  # a type checker reports every other name
    __getattr__ = lazy_face(__name__, FACE)
