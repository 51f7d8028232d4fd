"""The streams stdout and stderr, on which control characters appear as escapes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

from deepstack.base.text import fold_lines, printable


class Stream:
    """A text stream above another, which does everything that a subclass does not."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class PrintableStream(Stream):
    """A text stream that writes control characters as escapes.

    rich_proxied_file: the stream below; rich writes its own styles and cursor moves there.
    """

    encoding = "utf-8"  # click would bypass an ASCII stream and write to its buffer

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        return self.stream.write(printable(text))


class Terminal(Stream):
    """The stream that rich writes to; it ignores a closed one, so that work continues.

    Required by test_a_terminal_that_goes_away_does_not_stop_the_run.
    """

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()


@contextmanager
def printable_streams() -> Iterator[None]:
    """Make stdout and stderr write control characters as escapes within the context."""
    streams = [cast(TextIO, PrintableStream(stream)) for stream in (sys.stdout, sys.stderr)]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        yield


def raw(stream: TextIO) -> TextIO:
    """Return the stream below a PrintableStream, for texts with intended control characters."""
    return getattr(stream, "rich_proxied_file", stream)


def log(line: str) -> None:
    """Print a line on stderr, on a terminal folded at words.

    A closed stderr is ignored, so that the work continues.
    """
    with suppress(OSError):
        text, width = printable(line), width_of(sys.stderr)
        # a live display of rich replaces sys.stderr and prints to the stream below
        print(text if width is None else fold_lines(text, width), file=sys.stderr, flush=True)


def width_of(stream: TextIO) -> int | None:
    """Return the cells of a line of a terminal, None for a pipe or a file."""
    from rich.console import Console

    return Console(file=raw(stream)).width if raw(stream).isatty() else None
