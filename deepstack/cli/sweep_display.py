"""Shows a sweep: one bar for the whole, and state, step, loss and time left of every run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deepstack.cli.run_table import RunRow, changes_of_state, clock, counts, run_table
from deepstack.cli.streams import log, terminal_console
from deepstack.records.cells import counted
from deepstack.sweeps import Cell, Progress

Show = Callable[[Sequence[Progress]], None]


@contextmanager
def watch(quiet: bool, cells: Sequence[Cell], workers: int) -> Iterator[Show]:
    """Yield the display: a bar and a table on a terminal, else a line per change of state.

    quiet: nothing is shown.
    """
    console = terminal_console()
    began = time.monotonic()
    if quiet:
        yield lambda progress: None
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=2) as live:
            yield lambda progress: live.update(
                as_group(progress, console.height, time.monotonic() - began)
            )
    else:
        log(f"{counted('{} runs', len(cells))}, {min(workers, len(cells))} at a time")
        seen = {cell.folder.name: cell.state for cell in cells}
        latest: Sequence[Progress] = ()

        def show_lines(progress: Sequence[Progress]) -> None:
            nonlocal latest
            latest = progress
            started = [entry for entry in progress if entry.state != "waiting"]
            for line in changes_of_state(map(row_of, started), seen):
                log(line)

        yield show_lines
        if latest:
            log(summary(latest, time.monotonic() - began))


def row_of(entry: Progress) -> RunRow:
    """Return the values of a run for the table."""
    steps, left = entry.cell.config.train.steps, entry.seconds_left
    step_ms = 1000 * left / (steps - entry.step) if left and steps > entry.step else None
    return RunRow(
        entry.cell.folder.name, entry.state, entry.step, steps,
        entry.loss, entry.model_update, step_ms, left,
    )  # fmt: skip


def summary(progress: Sequence[Progress], elapsed: float) -> str:
    """Summarise a sweep, as in '12 of 24 done, 1 failed; 0:03:20 so far, about 0:04:10 left'."""
    left = seconds_left(progress, elapsed)
    about = "" if left is None else f", about {clock(left)} left"
    states = counts(entry.state for entry in progress)
    return f"{states}; {clock(elapsed)} so far{about}"


def work_of(entry: Progress, steps: int) -> float:
    """Return the work of some steps of a run: layers times tokens times steps."""
    return entry.cell.work * steps / max(entry.cell.config.train.steps, 1)


def work_left(entry: Progress) -> float:
    """Return the work that the sweep still has to do on a run."""
    is_over = entry.state not in ("waiting", "running")
    return 0.0 if is_over else work_of(entry, entry.cell.config.train.steps - entry.step)


def seconds_left(progress: Sequence[Progress], elapsed: float) -> float | None:
    """Estimate the seconds left for all runs from the work done so far in this sweep.

    Returns None if no work is done or left.
    """
    finished = sum(work_of(one, one.step - one.first_step) for one in progress if one.began)
    left = sum(map(work_left, progress))
    return elapsed * left / finished if finished and left else None


def as_group(progress: Sequence[Progress], height: int, elapsed: float = 0.0) -> Group:
    """Return one bar for the whole sweep with its counts, and a table of runs below it."""
    total = sum(entry.cell.work for entry in progress)
    head = Table.grid(expand=True)
    head.add_row(ProgressBar(total=max(total, 1), completed=total - sum(map(work_left, progress))))
    head.add_row(Text(summary(progress, elapsed)))
    return Group(head, run_table([row_of(entry) for entry in progress], height - 2))
