"""Shows the live table of a sweep: state, step, loss, ‖ΔF‖ and time left of every run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deepstack.cli.streams import log
from deepstack.records.cells import counted, one_line
from deepstack.sweeps import Cell, Progress

# the states in the order in which a short terminal shows them, with their colours
COLOURS = {
    "running": "cyan", "damaged": "red", "failed": "red", "out_of_memory": "red",
    "diverged": "red", "interrupted": "yellow", "waiting": "dim", "new": "dim", "done": "green",
}  # fmt: skip
ROWS = 40

Show = Callable[[Sequence[Progress]], None]


@contextmanager
def watch(quiet: bool, cells: Sequence[Cell], workers: int) -> Iterator[Show]:
    """Yield the display: a table on a terminal, else a line per change of state; quiet: nothing."""
    console, began = Console(stderr=True, markup=False, emoji=False), time.monotonic()
    if quiet:
        yield lambda progress: None
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=2) as live:
            yield lambda progress: live.update(
                as_table(progress, console.height, time.monotonic() - began)
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
    states = Counter(entry.state for entry in progress)
    parts = [f"{states.pop('done', 0):,} of {len(progress):,} done"]
    ends = ("diverged", "damaged", "failed", "out_of_memory", "interrupted")
    parts += [f"{states[name]:,} {name.replace('_', ' ')}" for name in ends if states[name]]
    left = seconds_left(progress, elapsed)
    about = "" if left is None else f", about {clock(left)} left"
    return f"{', '.join(parts)}; {clock(elapsed)} so far{about}"


def seconds_left(progress: Sequence[Progress], elapsed: float) -> float | None:
    """Estimate the seconds left for all runs from the work done so far in this sweep.

    The work of a run is layers times tokens times steps, as in the order of the plan. Returns None
    if no work is done or left.
    """
    finished = left = 0.0
    for entry in progress:
        steps = entry.cell.config.train.steps
        a_step = entry.cell.work / steps
        if entry.began:
            finished += a_step * (entry.step - entry.first_step)
        if entry.state in ("waiting", "running"):
            left += a_step * (steps - entry.step)
    return elapsed * left / finished if finished and left else None


def clock(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: '1:02:03'."""
    total = round(seconds)
    return f"{total // 3600}:{total // 60 % 60:02d}:{total % 60:02d}"


def as_table(progress: Sequence[Progress], height: int, elapsed: float = 0.0) -> Table:
    """Return the runs as a table that fits the terminal, running and failed ones first."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "state", "step", "loss", "‖ΔF‖", "left"):
        table.add_column(name, justify="left" if name in ("run", "state") else "right")
    order = list(COLOURS)
    chosen = sorted(progress, key=lambda entry: order.index(entry.state))
    count = max(5, min(ROWS, height - 6))
    shown = [entry for entry in progress if entry in chosen[:count]]
    for entry in shown:
        left = entry.seconds_left
        table.add_row(
            one_line(entry.cell.folder.name),
            Text(entry.state, COLOURS[entry.state]),
            f"{entry.step}/{entry.cell.config.train.steps}",
            "-" if entry.loss is None else f"{entry.loss:.4g}",
            "-" if entry.model_update is None else f"{entry.model_update:.4g}",
            "" if left is None or entry.state != "running" else f"{left:.0f} s",
        )
    table.caption = summary(progress, elapsed)
    if len(shown) < len(progress):
        table.caption = f"and {len(progress) - len(shown)} more; {table.caption}"
    return table
