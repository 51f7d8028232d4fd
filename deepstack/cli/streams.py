"""Makes stdout and stderr of the command line print control characters as escapes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TextIO, cast

from rich.console import Console

from deepstack.records.cells import printable


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
