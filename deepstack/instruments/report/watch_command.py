"""The command `deepstack watch DIR`, and its live table of runs, which `sweep` shows too."""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deepstack.base.errors import NothingMatchedError, ResourceError
from deepstack.cli.commands import command
from deepstack.cli.options import flag, option
from deepstack.cli.output import is_interactive, terminal_console
from deepstack.cli.signals import ended_by_ctrl_c
from deepstack.records import Run, RunFolder, find_runs
from deepstack.records.cells import one_line
from deepstack.records.folder import last_rows, logged_number

# A run on another machine may hold a lock that is not seen here: its log grows.
FRESH_SECONDS = 60.0
SUMMARY_SECONDS = 30.0
# the states in the order in which a short terminal shows them, with their colours
COLOURS = {
    "running": "cyan", "damaged": "red", "failed": "red", "out_of_memory": "red",
    "diverged": "red", "interrupted": "yellow", "waiting": "dim", "new": "dim", "done": "green",
}  # fmt: skip
ENDS = ("diverged", "damaged", "failed", "out_of_memory", "interrupted")
ROWS = 40


@command("Instruments", "deepstack watch results/")
def watch_command(
    directory: Path = typer.Argument(
        Path("results"), metavar="DIR", help="A results folder, a study or a run."
    ),
    interval: float = option("Seconds between two readings of the folders.", default=2.0, min=0.1),
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
        console.print(run_table(rows, len(rows) + 6, caption_of(rows, directory)))
        return
    with ended_by_ctrl_c():
        if is_interactive(sys.stdout):
            with Live(console=console, auto_refresh=False, redirect_stdout=False) as live:
                while True:
                    rows = watcher.read()
                    table = run_table(rows, console.height, caption_of(rows, directory))
                    live.update(table, refresh=True)
                    time.sleep(interval)
        print_lines(watcher, directory, interval)


def print_lines(watcher: Watcher, directory: Path, interval: float) -> None:
    """Print changes of state as lines, until interrupted."""
    seen: dict[str, str] = {}
    shown, last = -SUMMARY_SECONDS, ""
    while True:
        rows = watcher.read()
        for line in changes_of_state(rows, seen):
            print(line, flush=True)
        caption = caption_of(rows, directory)
        if caption != last and time.monotonic() - shown >= SUMMARY_SECONDS:
            shown, last = time.monotonic(), caption
            print(caption, flush=True)
        time.sleep(interval)


def caption_of(rows: Sequence[RunRow], directory: Path) -> str:
    """Return the counts of states and the longest remaining time of a running run."""
    if not rows:
        return f"no runs below {one_line(str(directory))} yet"
    left = [row.seconds_left for row in rows if row.seconds_left is not None]
    end = f"; the last of these in about {clock(max(left))}" if left else ""
    return counts(row.state for row in rows) + end


class Watcher:
    """Reads the ends of the logs of all runs below a folder; unchanged runs are not read again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rows: dict[object, RunRow] = {}

    def read(self) -> list[RunRow]:
        """Return the rows of the runs that are there now, by study and in natural order."""
        try:
            runs = find_runs(self.directory)
        except NothingMatchedError:
            runs = []
        several = len({run.path.parent for run in runs}) > 1
        known, self.rows = self.rows, {}
        for run in runs:
            name = f"{run.study}/{run.name}" if several else run.name
            files = run.folder.status_path, run.folder.steps_path, run.folder.timing_path
            reading = (run.path, name, *map(stamp, files))
            row = known.get(reading)
            # A process may end without a word: the lock of a running run is read every time.
            if row is None or row.state in ("running", "interrupted"):
                row = row_of(run, name)
            self.rows[reading] = row
        return list(self.rows.values())


def row_of(run: Run, name: str) -> RunRow:
    """Return the values that the table shows of a run."""
    try:
        state = run.read_state()
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


@dataclass(frozen=True)
class RunRow:
    """The values that the table shows of a run.

    step_ms: the time of a step in milliseconds, of a running run only, as seconds_left.
    """

    name: str
    state: str
    step: int
    steps: int | None
    loss: float | None = None
    model_update: float | None = None
    step_ms: float | None = None
    seconds_left: float | None = None


def read_row(folder: RunFolder, name: str, state: str, steps: int | None) -> RunRow:
    """Read the values that the table shows of a run from the ends of its logs.

    Raises ResourceError or ValueError for a log that is damaged.
    """
    last = folder.last_row()
    step = int(last.get("step", 0))
    loss, update = (
        logged_number(folder.steps_path, last[name]) if last.get(name) else None
        for name in ("loss", "model_update")
    )
    path = folder.timing_path
    times = last_rows(path)[1] if state == "running" else []
    step_times = [logged_number(path, row[1]) for row in times if len(row) > 1 and row[1]]
    step_ms = statistics.median(step_times) if step_times else None
    left = None if step_ms is None or steps is None else (steps - step) * step_ms / 1000
    return RunRow(name, state, step, steps, loss, update, step_ms, left)


def run_table(rows: Sequence[RunRow], height: int, caption: str = "") -> Table:
    """Return the runs as a table that fits the terminal, running and failed ones first."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "state", "step", "loss", "‖ΔF‖", "ms/step", "left"):
        table.add_column(name, justify="left" if name in ("run", "state") else "right")
    order = list(COLOURS)
    count = max(5, min(ROWS, height - 6))
    chosen = set(sorted(rows, key=lambda row: order.index(row.state))[:count])
    for row in [row for row in rows if row in chosen]:
        table.add_row(
            one_line(row.name),
            Text(row.state, COLOURS[row.state]),
            f"{row.step}/{row.steps or '?'}",
            *("-" if v is None else f"{v:.4g}" for v in (row.loss, row.model_update)),
            "" if row.step_ms is None else f"{row.step_ms:.3g}",
            "" if row.seconds_left is None else clock(row.seconds_left),
        )
    more = f"and {len(rows) - count} more" if len(rows) > count else ""
    table.caption = "; ".join(filter(None, [more, caption]))
    return table


def changes_of_state(rows: Iterable[RunRow], seen: dict[str, str]) -> Iterator[str]:
    """Yield a line for each run whose state is not that in `seen`, and put it there."""
    for row in rows:
        if seen.get(row.name) != row.state:
            seen[row.name] = row.state
            text = f"{row.state:<12} {one_line(row.name)}  step {row.step}/{row.steps or '?'}"
            if row.loss is not None and row.model_update is not None:
                text += f"  loss {row.loss:.4g}  ‖ΔF‖ {row.model_update:.4g}"
            yield text


def counts(states: Iterable[str]) -> str:
    """Count states, as in '12 of 24 done, 1 failed, 2 running'."""
    number = Counter(states)
    parts = [f"{number['done']:,} of {number.total():,} done"]
    parts += [f"{number[name]:,} {name}" for name in (*ENDS, "running") if number[name]]
    return ", ".join(parts).replace("_", " ")


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: '1:02:03'."""
    total = round(seconds)
    return f"{total // 3600}:{total // 60 % 60:02d}:{total % 60:02d}"
