"""The bar or status line of commands that take more than two seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from deepstack.cli.streams import log, raw, terminal_console
from deepstack.records import ENDED
from deepstack.records.cells import one_line, printable

if TYPE_CHECKING:
    from rich.progress import Progress

    from deepstack import sweeps

DELAY_SECONDS = 0.5  # a command that ends before shows nothing


class Work:
    """The progress of a command: a text, and the part that is done if the total is known."""

    def __init__(self, progress: Progress, text: str) -> None:
        self.progress, self.done = progress, 0
        self.task = progress.add_task(one_line(text), total=None)

    def step(self, text: str, total: int) -> None:
        """Begin the next of `total` parts; `text` names it."""
        self.show(text, self.done, total)
        self.done += 1

    def show(self, text: str, done: int, total: int) -> None:
        """Show a text, and that `done` of `total` parts are done."""
        self.progress.update(self.task, description=one_line(text), completed=done, total=total)

    def note(self, line: str) -> None:
        """Print a line on stderr, above the bar."""
        self.progress.console.print(printable(line), soft_wrap=True)


@contextmanager
def show_work(text: str, quiet: bool = False) -> Iterator[Work]:
    """Show a bar or a status line on stderr while the block runs, if it takes half a second.

    It is shown on a terminal only, and not if quiet; it is gone after the block.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    progress = Progress(
        BarColumn(bar_width=24),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=terminal_console(),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    work = Work(progress, text)
    if quiet or not raw(sys.stderr).isatty():
        yield work
        return
    timer = threading.Timer(DELAY_SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield work
    finally:
        timer.cancel()
        timer.join()
        progress.stop()


@contextmanager
def show_runs(text: str, quiet: bool) -> Iterator[Callable[[Sequence[sweeps.Progress]], None]]:
    """Yield a function that shows how many of the given runs have ended."""
    with show_work(text, quiet) as work:

        def show(progress: Sequence[sweeps.Progress]) -> None:
            ended = sum(entry.state in ENDED for entry in progress)
            work.show(f"{text}: {ended} of {len(progress)} runs", ended, len(progress))

        yield show


def log_figures(paths: Iterable[Path]) -> None:
    """Print the paths of PNG files on stderr."""
    for path in paths:
        if path.suffix == ".png":
            log(f"figure: {path}")
