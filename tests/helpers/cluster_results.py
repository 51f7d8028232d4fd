"""Waits for runs and ends processes; the data on which a cluster and this machine must agree."""

import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deepstack.records import Run, find_runs
from helpers.small_runs import data_of

GOES_ON = """\
import signal, sys, time
from pathlib import Path
kept = Path(sys.argv[1]) / "kept"
began = int(kept.read_text()) if kept.exists() else 0
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
for step in range(began, 4):
    print(f"step {step}: val loss {3 - step / 10}", flush=True)
    kept.write_text(str(step + 1))
    if step == 1:
        time.sleep(600 if began == 0 else 0)
"""
"""A command that waits in its second step until it is asked to end, and then goes on."""


def runs_of(out: Path) -> list[Run]:
    """The runs in a folder, none where there is nothing yet."""
    return find_runs(out) if any(out.glob("*/*/config.yaml")) else []


def steps_made(out: Path, study: str = "*") -> list[int]:
    """Return the number of rows in every run's log of steps so far."""
    return [log.read_text().count("\n") - 1 for log in out.glob(f"{study}/*/steps.csv")]


def results(out: Path, count: int) -> dict[str, dict[str, bytes]]:
    """Return the data of every run by its name; all of them must be done."""
    runs = find_runs(out)
    assert {run.name: run.state for run in runs} == {run.name: "done" for run in runs}
    assert len(runs) == count
    return {run.name: data_of(run) for run in runs}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def end(process: subprocess.Popen[Any]) -> None:
    """Ask a process to end, and kill it after some seconds."""
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def until(
    come: Callable[[], object],
    process: subprocess.Popen[Any] | None = None,
    *,
    what: str = "end of the wait",
    seconds: float = 60,
) -> None:
    """Wait for something that must come to pass while the process goes on."""
    deadline = time.monotonic() + seconds
    while not come():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.communicate()}")
        assert time.monotonic() < deadline, f"no {what} after {seconds:g} s"
        time.sleep(0.05)
