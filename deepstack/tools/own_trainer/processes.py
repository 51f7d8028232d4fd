"""The processes below a process, and signals to all of them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
# As under `deepstack`, nothing is imported from the present folder (-P).
CODE = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from deepstack.tools.own_trainer.supervise import main; main()"
)
SUPERVISE = [sys.executable, "-P", "-c", CODE, str(Path(__file__).parents[3])]
"""The words that start a supervisor, which reads its order from stdin."""


def adopt_orphans() -> None:
    """Become the parent of processes below this one whose own parent ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def parents() -> Iterator[tuple[int, int]]:
    """Yield each process of the system with its parent."""
    if Path("/proc/self/stat").exists():
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, ValueError):
                # the name, in brackets, may have spaces and brackets
                state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
                if state != "Z":
                    yield int(path.parent.name), int(parent)
        return
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
    for line in table.stdout.splitlines():
        process, parent = line.split()
        yield int(process), int(parent)


def below(process: int) -> list[int]:
    """Return the processes below a process, parents first."""
    children: dict[int, list[int]] = {}
    for child, parent in parents():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    todo = [process]
    while todo:
        new = children.get(todo.pop(), [])
        found += new
        todo += new
    return found


def signal_all(processes: list[int], number: int) -> None:
    """Send a signal to each process that is still there."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def kill_below(process: int, spared: Collection[int] = ()) -> None:
    """Kill the processes below a process but for some, also those that they start meanwhile."""
    for _ in range(100):
        if not (left := [one for one in below(process) if one not in spared]):
            return
        signal_all(left, signal.SIGKILL)
        with suppress(ChildProcessError):  # those that this process has adopted
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
