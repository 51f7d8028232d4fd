"""Shows the progress of one run: steps, loss, ‖ΔF‖ and time left."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from deepstack.cli.output import is_interactive, log, terminal_console
from deepstack.records.cells import printable
from deepstack.training import Observer, PlainLines, Started


class Lines(PlainLines):
    """Plain lines on stderr, for a pipe or a job's log."""

    def line(self, text: str) -> None:
        log(text)


class Display(PlainLines):
    """A bar with the values of the last step on a terminal, and plain lines above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(seconds=0.0)
        self.progress = Progress(
            TextColumn("{task.description}"),  # the step; a narrow terminal cuts the bar first
            BarColumn(bar_width=None),
            TextColumn("{task.fields[values]}", markup=False),
            console=console,
            expand=True,
            refresh_per_second=4,
            transient=True,
        )
        self.task = self.progress.add_task("building …", total=None, values="")

    def line(self, text: str) -> None:
        self.progress.console.print(printable(text), highlight=False, soft_wrap=True)

    def started(self, run: Started) -> None:
        super().started(run)
        done = run.first_step - 1
        self.progress.update(
            self.task, total=run.steps, completed=done, description=f"{done}/{run.steps}"
        )

    def show(self, step: int, steps: int, text: str) -> None:
        self.progress.update(self.task, completed=step, description=f"{step}/{steps}", values=text)


@contextmanager
def observe(quiet: bool) -> Iterator[Observer]:
    """Yield an observer: a bar on a terminal, plain lines elsewhere, silent if quiet."""
    console = terminal_console()
    if quiet:
        yield Observer()
    elif is_interactive(sys.stderr):
        display = Display(console)
        with display.progress:
            yield display
    else:
        yield Lines()
