"""Shows the progress of one run: steps, loss, ‖ΔF‖ and time left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from deepstack.cli.streams import log, terminal_console
from deepstack.records.cells import printable
from deepstack.training import Observer, PlainLines, Row, Started
from deepstack.training.observer import Pace, number, validation

BLOCKS = "▁▂▃▄▅▆▇█"
SYMBOLS = {"loss": "loss", "model_update": "‖ΔF‖", "grad_norm": "‖∇L‖"}
"""The quantities that the panel shows."""


class Lines(PlainLines):
    """Plain lines on stderr, for a pipe or a job's log."""

    def line(self, text: str) -> None:
        log(text)


class Display(Observer):
    """A terminal panel that is redrawn in place, with evaluations as lines above it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.run: Started | None = None
        self.histories: dict[str, list[float]] = {name: [] for name in SYMBOLS}
        self.row: Row = {}
        self.pace = Pace()
        self.last_evaluation: Row = {}
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
            console=console,
            expand=True,
        )
        self.task = self.progress.add_task("", total=None, pace="")
        self.live = Live(
            get_renderable=self.render, console=console, refresh_per_second=4, transient=True
        )

    def started(self, run: Started) -> None:
        self.run = run
        self.console.print(
            Text(run.label, "bold"),
            f", {run.layers} layers, {run.parameters:,} parameters on {run.device}",
            sep="",
        )
        self.console.print(Text(printable(str(run.folder.path)), "dim"))
        if run.first_step > 1:
            self.console.print(f"continues at step {run.first_step}")
        self.progress.reset(
            self.task, total=run.steps, completed=run.first_step - 1, description="training"
        )

    def stepped(self, step: int, row: Row) -> None:
        self.row = row
        for name, history in self.histories.items():
            history.append(row[name] or 0.0)
        self.pace.add(row)
        left = self.run.steps - step if self.run else 0
        self.progress.update(self.task, completed=step, pace=self.pace.text(left))

    def evaluated(self, step: int, row: Row) -> None:
        self.last_evaluation = row

    def notify(self, line: str) -> None:
        self.console.print(printable(line))

    def finished(self, state: str, step: int) -> None:
        self.live.stop()
        colour = {"done": "green", "diverged": "red"}.get(state, "yellow")
        self.console.print(Text(state, colour), f"at step {step}: ", self.summary())

    def summary(self) -> Text:
        """Return the last validation loss beside its reference losses."""
        row = self.last_evaluation
        return Text(f"validation {validation(row)}" if row else "")

    def render(self) -> Any:
        """Return the panel: one line per quantity, with its history as a small bar chart."""
        if self.run is None:
            return Text("building …")
        floors = "  ".join(
            f"{shorten(name)} {loss:.3f}" for name, loss in self.run.references.items()
        )
        notes = (floors, f"unrelated states {self.run.unrelated:.3g}", "")
        width = self.console.width - max(map(len, notes)) - 22
        table = Table.grid(padding=(0, 2))
        for _ in range(4):
            table.add_column(no_wrap=True)
        for (name, history), note in zip(self.histories.items(), notes, strict=True):
            table.add_row(SYMBOLS[name], number(self.row.get(name)), bars(history, width), note)
        return Group(self.progress, table, self.summary())


def shorten(reference: str) -> str:
    """Shorten a reference's name: 'unigram' for unigram_entropy."""
    return reference.removesuffix("_entropy").removesuffix("_loss").replace("_", "-")


def bars(values: list[float], width: int) -> str:
    """Return a quantity's history as blocks whose heights are means over equal spans."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    spans = np.array_split(finite, max(2, min(width, 48, len(finite))))
    means = [span.mean() for span in spans]
    heights = np.interp(means, (min(means), max(means)), (0, 7))
    return "".join(BLOCKS[int(height)] for height in heights)


@contextmanager
def observe(quiet: bool) -> Iterator[Observer]:
    """Yield an observer: a panel on a terminal, plain lines elsewhere, silent if quiet."""
    console = terminal_console()
    if quiet:
        yield Observer()
    elif console.is_terminal:
        display = Display(console)
        with display.live:
            yield display
    else:
        yield Lines()
