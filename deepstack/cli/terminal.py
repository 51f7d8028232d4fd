"""What commands print besides their result: lines, status lines and bars on stderr.

Control characters, as from a hostile file name, appear as escapes on both streams.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

from rich.console import Console

from deepstack.records import ENDED
from deepstack.records.cells import one_line, printable

if TYPE_CHECKING:
    from rich.progress import Progress

    from deepstack import sweeps

DELAY_SECONDS = 0.5  # a command that ends before shows nothing


class PrintableStream:
    """A text stream that writes control characters as escapes.

    rich_proxied_file: the stream below; rich writes its own styles and cursor moves there.
    """

    encoding = "utf-8"  # click would bypass an ASCII stream and write to its buffer

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def printable_streams() -> Iterator[None]:
    """Make stdout and stderr write control characters as escapes within the context."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, PrintableStream(stream)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def log(line: str) -> None:
    """Print a line on stderr; ignore a closed stderr, so that the work continues."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def raw(stream: TextIO) -> TextIO:
    """Return the stream below a PrintableStream, for texts with intended control characters."""
    return getattr(stream, "rich_proxied_file", stream)


class Terminal:
    """The stderr or stdout that rich writes to; it ignores a closed one, so that work continues.

    Required by test_a_terminal_that_goes_away_does_not_stop_the_run.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = raw(stream or sys.stderr)  # a live display replaces sys.stderr

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def terminal_console(stream: TextIO | None = None) -> Console:
    """Return rich's console on stderr, or on another stream, that ignores a closed one."""
    return Console(file=cast(IO[str], Terminal(stream)), markup=False, emoji=False)


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
