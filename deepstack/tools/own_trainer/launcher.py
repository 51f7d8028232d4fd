"""Runs of commands on this machine, so many at a time, each below a supervisor."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from deepstack.base import torchrun
from deepstack.sweeps import Cell, Launcher
from deepstack.tools.own_trainer.cells import CommandCell
from deepstack.tools.own_trainer.processes import SUPERVISE, below, signal_all

TO_ALL = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)
"""Signals that a supervisor cannot pass on."""


class CommandLauncher(Launcher):
    """Starts a supervisor for each run.

    workers: runs at a time.
    gpus: names of the GPUs that they share; each run sees one.  Empty: all runs see all.
    """

    def __init__(self, workers: int, command_line: str, gpus: Sequence[str] = ()) -> None:
        self.workers, self.command_line, self.gpus = workers, command_line, list(gpus)
        self.running: list[Supervised] = []

    def start(self, cell: Cell) -> Supervised | None:
        self.running = [one for one in self.running if one.poll() is None]
        if len(self.running) >= self.workers:
            return None
        assert isinstance(cell, CommandCell)
        environment: dict[str, str] = {}
        if self.gpus:
            used = [one.gpu for one in self.running]
            environment["CUDA_VISIBLE_DEVICES"] = min(self.gpus, key=used.count)
        order = cell.order(self.command_line, environment)
        self.running.append(Supervised(order, environment.get("CUDA_VISIBLE_DEVICES")))
        return self.running[-1]

    def close(self) -> None:
        for one in self.running:
            one.close()


class Supervised:
    """The supervisor of a run.  gpu: the GPU that the run sees, None for all."""

    def __init__(self, order: Mapping[str, Any], gpu: str | None) -> None:
        self.gpu = gpu
        self._errors, self._text = tempfile.TemporaryFile(), ""
        self._process = subprocess.Popen(
            # the folder is for those who look at the list of processes
            [*SUPERVISE, order["folder"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=torchrun.without_launch(),
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(order).encode())

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        code = self._process.poll()
        if code is not None and not self._errors.closed:
            self._errors.seek(0)
            self._text = self._errors.read().decode("utf-8", "replace")
            self._errors.close()
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the supervisor, and some to all processes below it too."""
        if self.poll() is None:
            others = below(self._process.pid) if number in TO_ALL else []
            signal_all([self._process.pid, *others], number)

    def stderr_text(self) -> str:
        """Return what the supervisor has printed on stderr, once it has ended."""
        return self._text

    def close(self) -> None:
        """Wait for the supervisor, which has ended or was killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self.poll()
        self._errors.close()
