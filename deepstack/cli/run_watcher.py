"""Follows the runs of a folder, as `deepstack ls --watch` and the served report show them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from deepstack.base.errors import NothingMatchedError, ResourceError
from deepstack.base.progress import print_now
from deepstack.base.text import clock_text, one_line
from deepstack.cli.output import is_interactive, terminal_console
from deepstack.cli.run_table import RunRow, changes_of_state, counts, live_table, read_row
from deepstack.cli.signals import ended_by_ctrl_c
from deepstack.cli.views import table_view
from deepstack.records import Run

if TYPE_CHECKING:
    from deepstack.runs import Runs

# A run on another machine may hold a lock that is not seen here: its log grows.
FRESH_SECONDS = 60.0
SUMMARY_SECONDS = 30.0
READ_SECONDS = 1.0


def watch(find: Callable[[], Runs], directory: Path) -> None:
    """Show runs while any process trains them, until Ctrl-C.

    Without a terminal, print a line for each change of state, and the counts twice a minute.

    find: returns the runs that are there now; directory: their folder.
    """
    watcher = RunWatcher(find)
    with ended_by_ctrl_c():
        if not is_interactive(sys.stdout):
            print_lines(watcher, directory)
        console = terminal_console(sys.stdout)
        view = table_view(console)
        with view.live:
            while True:
                rows = watcher.read()
                caption = caption_of(rows, directory)
                table = live_table(rows, console.width, console.height, caption)
                view.show_table(table, refresh=True)
                time.sleep(READ_SECONDS)


def print_lines(watcher: RunWatcher, directory: Path) -> NoReturn:
    """Print changes of state as lines, until interrupted."""
    seen: dict[str, str] = {}
    shown, last = -SUMMARY_SECONDS, ""
    while True:
        rows = watcher.read()
        for line in changes_of_state(rows, seen):
            print_now(line)
        caption = caption_of(rows, directory)
        if caption != last and time.monotonic() - shown >= SUMMARY_SECONDS:
            shown, last = time.monotonic(), caption
            print_now(caption)
        time.sleep(READ_SECONDS)


def caption_of(rows: Sequence[RunRow], directory: Path) -> str:
    """Return the counts of states and the longest remaining time of a running run."""
    if not rows:
        return f"no runs below {one_line(str(directory))} yet"
    left = [row.seconds_left for row in rows if row.seconds_left is not None]
    end = f"; the last of these in about {clock_text(max(left))}" if left else ""
    return counts(row.state for row in rows) + end


class RunWatcher:
    """Reads the ends of the logs of runs; unchanged runs are not read again.

    find: returns the runs that are there now, or raises NothingMatchedError.
    """

    def __init__(self, find: Callable[[], Runs]) -> None:
        self.find = find
        self.rows: dict[object, RunRow] = {}

    def read(self) -> list[RunRow]:
        """Return the rows of the runs that are there now."""
        return [row for _, row in self.read_runs()]

    def read_runs(self) -> list[tuple[Run, RunRow]]:
        """Return the runs that are there now with their rows."""
        try:
            runs: Sequence[Run] = self.find()
        except NothingMatchedError:
            runs = []
        several = len({run.path.parent for run in runs}) > 1
        known, self.rows = self.rows, {}
        found = []
        for run in runs:
            name = f"{run.study}/{run.name}" if several else run.name
            files = run.folder.status_path, run.folder.steps_path, run.folder.timing_path
            reading = (run.path, name, *map(time_and_size, files))
            row = known.get(reading)
            # A process may end without a word: the lock of a running run is read every time.
            if row is None or row.state in ("running", "interrupted"):
                row = row_of(run, name)
            self.rows[reading] = row
            found.append((run, row))
        return found


def row_of(run: Run, name: str) -> RunRow:
    """Return the values that the table shows of a run."""
    try:
        state = run.folder.present_state()
        if state == "interrupted" and run.status.get("state") == "running":
            changed = time_and_size(run.folder.steps_path)
            if changed and time.time() - changed[0] / 1e9 < FRESH_SECONDS:
                state = "running"
        steps = run.get("train.steps")
        return read_row(run.folder, name, state, steps if isinstance(steps, int) else None)
    except (ResourceError, ValueError):
        return RunRow(name, "damaged", 0, None)


def time_and_size(path: Path) -> tuple[int, int] | None:
    """Return time of change and size of a file, or None without one."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
