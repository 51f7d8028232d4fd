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

from deepstack.cli.run_table import RunRow, clock, counts, run_table
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
        seen = {id(cell): cell.state for cell in cells}
        latest: Sequence[Progress] = ()

        def lines(progress: Sequence[Progress]) -> None:
            nonlocal latest
            latest = progress
            for entry in progress:
                if seen[id(entry.cell)] != entry.state and entry.state != "waiting":
                    seen[id(entry.cell)] = entry.state
                    text = f"{entry.state:<12} {entry.cell.folder.name}  step {entry.step}"
                    if entry.loss is not None:
                        text += f"  loss {entry.loss:.4g}  ‖ΔF‖ {entry.model_update:.4g}"
                    log(text)

        yield lines
        if latest:
            log(summary(latest, time.monotonic() - began))


def summary(progress: Sequence[Progress], elapsed: float) -> str:
    """Summarise a sweep, as in '12 of 24 done, 1 failed; 0:03:20 so far, about 0:04:10 left'."""
    left = seconds_left(progress, elapsed)
    about = "" if left is None else f", about {clock(left)} left"
    states = counts(entry.state for entry in progress)
    return f"{states}; {clock(elapsed)} so far{about}"


def seconds_left(progress: Sequence[Progress], elapsed: float) -> float | None:
    """Estimate the seconds left for all runs from the work done so far in this sweep.

    The work of a run is layers times tokens times steps, as in the order of the plan. Returns None
    if no work is done or left.
    """
    finished = left = 0.0
    for entry in progress:
        steps = entry.cell.config.train.steps
        a_step = entry.cell.work / max(steps, 1)
        if entry.began:
            finished += a_step * (entry.step - entry.first_step)
        if entry.state in ("waiting", "running"):
            left += a_step * (steps - entry.step)
    return elapsed * left / finished if finished and left else None


def as_group(progress: Sequence[Progress], height: int, elapsed: float = 0.0) -> Group:
    """Return one bar for the whole sweep with its counts, and a table of runs below it."""
    states = [entry.state for entry in progress]
    total = sum(entry.cell.work for entry in progress)
    ended = [is_over(state) for state in states]
    completed = sum(
        entry.cell.work * (1 if over else entry.step / max(entry.cell.config.train.steps, 1))
        for entry, over in zip(progress, ended, strict=True)
    )
    rows = [
        RunRow(
            entry.cell.folder.name, entry.state, entry.step, entry.cell.config.train.steps,
            entry.loss, entry.model_update, ms_a_step(entry), entry.seconds_left,
        )
        for entry in progress
    ]  # fmt: skip
    head = Table.grid(expand=True)
    head.add_row(ProgressBar(total=max(total, 1), completed=completed))
    head.add_row(Text(summary(progress, elapsed)))
    return Group(head, run_table(rows, height - 2))


def ms_a_step(entry: Progress) -> float | None:
    """Return the milliseconds of a step of a running run, from all of its steps so far."""
    left = entry.cell.config.train.steps - entry.step
    return None if entry.seconds_left is None or left <= 0 else 1000 * entry.seconds_left / left


def is_over(state: str) -> bool:
    """Return whether the sweep does no more work on a run of this state."""
    return state not in ("waiting", "running")
