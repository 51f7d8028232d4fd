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

    def __init__(self, text: str) -> None:
        self.text, self.done, self.total = text, 0, 0
        self._progress: Progress | None = None
        self._is_over = False
        self._lock = threading.Lock()

    def step(self, text: str, total: int) -> None:
        """Begin the next of `total` parts; `text` names it."""
        self.show(text, self.done, total)
        self.done += 1

    def show(self, text: str, done: int, total: int) -> None:
        """Show a text, and that `done` of `total` parts are done."""
        self.text, self.done, self.total = text, done, total
        self._refresh()

    def note(self, line: str) -> None:
        """Print a line on stderr, above the bar."""
        with self._lock:
            if self._progress is None:
                log(line)
            else:
                self._progress.console.print(printable(line), soft_wrap=True)

    def _refresh(self) -> None:
        if self._progress is not None:
            self._progress.update(
                self._progress.task_ids[0], description=one_line(self.text),
                completed=self.done, total=self.total or None,
            )  # fmt: skip

    def _show(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            BarColumn(bar_width=24), TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
        )  # fmt: skip
        with self._lock:
            if self._is_over:
                return
            self._progress = Progress(
                *columns, console=terminal_console(), transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._progress.add_task(one_line(self.text), total=None)
            self._refresh()
            self._progress.start()

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            if self._progress is not None:
                self._progress.stop()
                self._progress = None


@contextmanager
def show_work(text: str, quiet: bool = False) -> Iterator[Work]:
    """Show a bar or a status line on stderr while the block runs, if it takes half a second.

    It is shown on a terminal only, and not if quiet; it is gone after the block.
    """
    work = Work(text)
    if quiet or not raw(sys.stderr).isatty():
        yield work
        return
    timer = threading.Timer(DELAY_SECONDS, work._show)
    timer.daemon = True
    timer.start()
    try:
        yield work
    finally:
        timer.cancel()
        work._end()


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
