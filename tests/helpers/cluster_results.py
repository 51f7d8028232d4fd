"""Waiting for runs, and what those of a cluster and of this machine must agree on."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepstack.records import Run, find_runs


def runs_of(out: Path) -> list[Run]:
    """The runs in a folder, none where there is nothing yet."""
    return find_runs(out) if any(out.glob("*/*/config.yaml")) else []


def results(out: Path, count: int) -> dict[str, dict[str, bytes]]:
    """Of every run, which must be done: logs, layers and weights, byte for byte."""
    found = {}
    for run in find_runs(out):
        assert run.state == "done", run.name
        paths = [run.folder.steps_path, run.folder.evals_path]
        paths += [*run.folder.layers_dir.iterdir(), *run.path.rglob("*.safetensors")]
        found[run.name] = {str(path.relative_to(run.path)): path.read_bytes() for path in paths}
    assert len(found) == count
    return found


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
