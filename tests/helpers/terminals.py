"""Runs commands whose stderr is a terminal."""

import os
import pty
import select
import subprocess
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


def run_on_terminal(*words: str) -> tuple[str, str]:
    """Return stdout, a pipe, and the text that a terminal gets on stderr."""
    code = (
        "import deepstack.cli.output as p; p.DELAY_SECONDS = 0.0\n"
        "from deepstack.cli import main; main()"
    )
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-c", code, *words]
    with (
        terminal() as (stderr, read),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True
        ) as process,
    ):
        shown = ""
        while process.poll() is None:
            shown += read()
        shown += "".join(iter(read, ""))
        assert process.returncode == 0 and process.stdout is not None, shown
        return process.stdout.read(), shown


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
