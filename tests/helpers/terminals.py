"""Runs commands whose stderr is a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading


def run_on_terminal(*words: str) -> tuple[str, str]:
    """Return stdout, a pipe, and the text that a terminal gets on stderr."""
    ours, theirs = pty.openpty()
    code = (
        "import deepstack.cli.progress as p; p.DELAY_SECONDS = 0.0\n"
        "from deepstack.cli import main; main()"
    )
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-c", code, *words]
    shown: list[bytes] = []

    def read() -> None:
        try:
            while part := os.read(ours, 1 << 16):
                shown.append(part)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=read)
    reader.start()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=theirs, env=environment, check=True
    )
    os.close(theirs)
    reader.join()
    os.close(ours)
    return done.stdout.decode(), b"".join(shown).decode("utf-8", "replace")
