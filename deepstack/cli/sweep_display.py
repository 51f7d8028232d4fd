"""Shows a sweep: one bar for the whole, and state, step, loss and time left of every run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from deepstack.cli.run_table import RunRow, changes_of_state, clock, counts, read_row, run_table
from deepstack.cli.streams import log, terminal_console
from deepstack.errors import ResourceError
from deepstack.records.cells import counted
from deepstack.sweeps import Cell, Progress

Show = Callable[[Sequence[Progress]], None]


@contextmanager
def watch(quiet: bool, cells: Sequence[Cell]) -> Iterator[Show]:
    """Yield the display: a bar and a table on a terminal, else a line per change of state.

    quiet: nothing is shown.
    """
    console, rows = terminal_console(), Rows()
    if quiet:
        yield lambda progress: None
    elif console.is_terminal:
        bar = Bar(
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            expand=True,
            speed_estimate_period=3600,  # not the pace of the last run alone
        )
        total = sum(cell.flops for cell in cells)
        task = bar.add_task("", total=total)
        with Live(console=console, refresh_per_second=2) as live:

            def show(progress: Sequence[Progress]) -> None:
                known = rows.read(progress)
                done = total - sum(map(flops_left, progress, known))
                text = counts(entry.state for entry in progress)
                bar.update(task, completed=done, description=text)
                live.update(Group(bar, run_table(known, console.height - 1)))

            yield show
    else:
        log(counted("{} runs", len(cells)))
        began, seen = time.monotonic(), {cell.folder.name: cell.state for cell in cells}

        def show_lines(progress: Sequence[Progress]) -> None:
            started = [row for row in rows.read(progress) if row.state != "waiting"]
            for line in changes_of_state(started, seen):
                log(line)

        yield show_lines
        if rows.states:
            log(f"{counts(rows.states)}; {clock(time.monotonic() - began)} in all")


class Rows:
    """Reads the rows of a sweep's runs; those that do not run are read once in each state."""

    def __init__(self) -> None:
        self._known: dict[str, RunRow] = {}

    @property
    def states(self) -> list[str]:
        """The states of all runs when they were last read."""
        return [row.state for row in self._known.values()]

    def read(self, progress: Sequence[Progress]) -> list[RunRow]:
        """Return the rows in the order of the cells."""
        for entry in progress:
            folder, steps = entry.cell.folder, entry.cell.config.train.steps
            known = self._known.get(folder.name)
            if known is None or known.state != entry.state or entry.state == "running":
                try:
                    row = read_row(folder, folder.name, entry.state, steps)
                except (ResourceError, ValueError):
                    row = RunRow(folder.name, entry.state, 0, steps)
                self._known[folder.name] = row
        return list(self._known.values())


def flops_left(entry: Progress, row: RunRow) -> float:
    """Return the FLOPs that the sweep still has to do on a run."""
    if row.state not in ("waiting", "running"):
        return 0.0
    return entry.cell.flops * (1 - row.step / max(entry.cell.config.train.steps, 1))
