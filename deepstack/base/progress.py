"""Progress of work: one stream of events, and the views that show it.

`LineView` writes plain lines, and `NotebookView` draws a bar in the output of a cell.  Commands
have a third one, of a terminal: `deepstack.cli.views.TerminalView`.
"""

import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any

DRAWING_SECONDS = 0.2  # between two drawings in a notebook
WIDTH = 24  # characters of a bar in text


class View:
    """Receives the progress of some work; the base class shows nothing."""

    def begin(self, done: int, total: int) -> None:
        """Set how much of the work there is, and how much is done already."""

    def show(self, done: int, total: int, text: str) -> None:
        """Show the present state, which the next one replaces: `done` of `total`, and a text."""

    def wait(self, text: str) -> None:
        """Show the name of a long part of the work until the next state."""

    def line(self, text: str) -> None:
        """Show a line, which stays."""


def print_now(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


class LineView(View):
    """Writes each event as a line.

    write: receives the lines.
    state: the form of a state; without one, states are not written.
    every: least time between two states, and before the first one, seconds.
    """

    def __init__(
        self, write: Callable[[str], None] = print_now, state: str = "", every: float = 0.0
    ) -> None:
        self.write, self.state, self.every = write, state, every
        self._written = time.monotonic()

    def show(self, done: int, total: int, text: str) -> None:
        if self.state and time.monotonic() - self._written >= self.every:
            self._written = time.monotonic()
            self.write(self.state.format(done=done, total=total, text=text))

    def wait(self, text: str) -> None:
        self.line(text)

    def line(self, text: str) -> None:
        self.write(text)


class NotebookView(View):
    """A bar with the latest text in the output of a cell, redrawn in place.

    Plain HTML with a text form; it needs no widgets.  All texts are escaped.
    """

    def __init__(self) -> None:
        self.done, self.total, self.text = 0, 0, ""
        self._handle: Any = None
        self._drawn = -DRAWING_SECONDS

    def begin(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def show(self, done: int, total: int, text: str) -> None:
        """Draw a state at most every 0.2 seconds, and the last one in any case."""
        self.done, self.total, self.text = done, total, text
        if time.monotonic() - self._drawn >= DRAWING_SECONDS or done >= total:
            self._draw()

    def wait(self, text: str) -> None:
        self.show(self.done, self.total, text)

    def line(self, text: str) -> None:
        self.text = text
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._handle is None:
            self._handle = sys.modules["IPython"].display.display(self, display_id=True)
        else:
            self._handle.update(self)

    def __repr__(self) -> str:
        filled = WIDTH * self.done // max(self.total, 1)
        bar = "#" * filled + "-" * (WIDTH - filled)
        return f"[{bar}] {self.done}/{self.total}  {self.text}".rstrip()

    def _repr_html_(self) -> str:
        bar = f"<progress value='{self.done}' max='{max(self.total, 1)}'></progress>"
        return f"{bar} {self.done}/{self.total} &nbsp;{escape(self.text)}"
