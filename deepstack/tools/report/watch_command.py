"""The command `deepstack watch DIR`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from deepstack.base import NothingMatchedError, ResourceError, clock_text, one_line, print_now
from deepstack.cli import (
    RunRow,
    changes_of_state,
    command,
    counts,
    ended_by_ctrl_c,
    flag,
    is_interactive,
    live_table,
    option,
    read_row,
    table_view,
    terminal_console,
)
from deepstack.records import Run, find_runs

# A run on another machine may hold a lock that is not seen here: its log grows.
FRESH_SECONDS = 60.0
SUMMARY_SECONDS = 30.0


@command("Tools", "deepstack watch results/")
def watch_command(
    directory: Path = typer.Argument(
        Path("results"), metavar="DIR", help="A results folder, a study or a run."
    ),
    interval: float = option("Seconds between two readings of the folders.", default=1.0, min=0.1),
    once: bool = flag("Print the table once and end.", "--once"),
) -> None:
    """Show all runs below a folder while any process trains them; Ctrl-C ends it.

    Without a terminal, print a line for each change of state, and the counts twice a minute.
    """
    watcher = Watcher(directory)
    console = terminal_console(sys.stdout)
    if once:
        find_runs(directory)  # raises NothingMatchedError without any
        rows = watcher.read()
        console.print(live_table(rows, console.width, len(rows) + 6, caption_of(rows, directory)))
        return
    with ended_by_ctrl_c():
        if is_interactive(sys.stdout):
            view = table_view(console)
            with view.live:
                while True:
                    rows = watcher.read()
                    table = live_table(
                        rows, console.width, console.height, caption_of(rows, directory)
                    )
                    view.show_table(table, refresh=True)
                    time.sleep(interval)
        print_lines(watcher, directory, interval)


def print_lines(watcher: Watcher, directory: Path, interval: float) -> None:
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
        time.sleep(interval)


def caption_of(rows: Sequence[RunRow], directory: Path) -> str:
    """Return the counts of states and the longest remaining time of a running run."""
    if not rows:
        return f"no runs below {one_line(str(directory))} yet"
    left = [row.seconds_left for row in rows if row.seconds_left is not None]
    end = f"; the last of these in about {clock_text(max(left))}" if left else ""
    return counts(row.state for row in rows) + end


class Watcher:
    """Reads the ends of the logs of all runs below a folder; unchanged runs are not read again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rows: dict[object, RunRow] = {}

    def read(self) -> list[RunRow]:
        """Return the rows of the runs that are there now, by study and in natural order."""
        return [row for _, row in self.read_runs()]

    def read_runs(self) -> list[tuple[Run, RunRow]]:
        """Return the runs that are there now with their rows, by study and in natural order."""
        try:
            runs = find_runs(self.directory)
        except NothingMatchedError:
            runs = []
        several = len({run.path.parent for run in runs}) > 1
        known, self.rows = self.rows, {}
        found = []
        for run in runs:
            name = f"{run.study}/{run.name}" if several else run.name
            files = run.folder.status_path, run.folder.steps_path, run.folder.timing_path
            reading = (run.path, name, *map(stamp, files))
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
            changed = stamp(run.folder.steps_path)
            if changed and time.time() - changed[0] / 1e9 < FRESH_SECONDS:
                state = "running"
        steps = run.get("train.steps")
        return read_row(run.folder, name, state, steps if isinstance(steps, int) else None)
    except (ResourceError, ValueError):
        return RunRow(name, "damaged", 0, None)


def stamp(path: Path) -> tuple[int, int] | None:
    """Return time of change and size of a file, or None without one."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
