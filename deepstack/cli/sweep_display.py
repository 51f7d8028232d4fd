"""The live table of a sweep: every run with state, step, loss, ‖ΔF‖ and time left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from deepstack.sweeps import Cell, Progress

COLOURS = {
    "done": "green",
    "running": "cyan",
    "diverged": "red",
    "failed": "red",
    "out_of_memory": "red",
    "interrupted": "yellow",
}
ROWS = 40

Show = Callable[[Sequence[Progress]], None]


@contextmanager
def watch(quiet: bool, cells: Sequence[Cell], workers: int) -> Iterator[Show]:
    """A table on a terminal, a line a change of state elsewhere, nothing when quiet."""
    console = Console(stderr=True)
    if quiet:
        yield lambda progress: None
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=2) as live:
            yield lambda progress: live.update(as_table(progress, console.height))
    else:
        say(f"{len(cells)} runs, {workers} at a time")
        seen = {id(cell): cell.state for cell in cells}

        def lines(progress: Sequence[Progress]) -> None:
            for entry in progress:
                if seen[id(entry.cell)] != entry.state and entry.state != "waiting":
                    seen[id(entry.cell)] = entry.state
                    text = f"{entry.state:<12} {entry.cell.folder.name}  step {entry.step}"
                    if entry.loss is not None:
                        text += f"  loss {entry.loss:.4g}  ‖ΔF‖ {entry.model_update:.4g}"
                    say(text)

        yield lines


def say(line: str) -> None:
    """A line on stderr; nothing where nobody reads it any more."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def as_table(progress: Sequence[Progress], height: int) -> Table:
    """The runs as a table that fits the terminal: what runs and what failed comes first."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "state", "step", "loss", "‖ΔF‖", "left"):
        table.add_column(name, justify="left" if name in ("run", "state") else "right")
    order = ("running", "failed", "out_of_memory", "diverged", "interrupted", "waiting", "new")
    chosen = sorted(
        progress, key=lambda e: order.index(e.state) if e.state in order else len(order)
    )
    room = max(5, min(ROWS, height - 6))
    shown = [entry for entry in progress if entry in chosen[:room]]
    for entry in shown:
        colour = COLOURS.get(entry.state, "dim")
        left = entry.seconds_left
        table.add_row(
            entry.cell.folder.name,
            f"[{colour}]{entry.state}[/{colour}]",
            f"{entry.step}/{entry.cell.config.train.steps}",
            "-" if entry.loss is None else f"{entry.loss:.4g}",
            "-" if entry.model_update is None else f"{entry.model_update:.4g}",
            "" if left is None or entry.state != "running" else f"{left:.0f} s",
        )
    if len(shown) < len(progress):
        table.caption = f"and {len(progress) - len(shown)} more"
    return table
