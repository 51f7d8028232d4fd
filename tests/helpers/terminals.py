"""Terminals for commands to write to."""

import os
import pty
import select
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def terminal() -> Iterator[tuple[TextIO, Callable[[], str]]]:
    """Yield a terminal to write to, and a function that returns its next part, '' without one."""
    ours, theirs = pty.openpty()
    decode = getincrementaldecoder("utf-8")("replace").decode

    def read() -> str:
        return decode(os.read(ours, 1 << 16)) if select.select([ours], [], [], 0.5)[0] else ""

    with os.fdopen(theirs, "w") as file:
        yield file, read
    os.close(ours)
