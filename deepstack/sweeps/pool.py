"""The runs of a plan, in order, wherever a launcher starts them; nothing done twice."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deepstack.records import Run
from deepstack.sweeps.launcher import Launcher, Process
from deepstack.sweeps.plan import RUN_AGAIN, Cell

POLL_SECONDS = 0.1


@dataclass
class Progress:
    """One cell while the sweep goes on: what its folder says, and its process while it has one."""

    cell: Cell
    state: str
    process: Process | None = None
    began: float = 0.0
    step: int = 0
    loss: float | None = None
    model_update: float | None = None
    message: str = ""
    first_step: int = 0

    @property
    def seconds_left(self) -> float | None:
        """By the pace of this process so far; None before its first step."""
        made = self.step - self.first_step
        if self.process is None or made <= 0:
            return None
        return (time.monotonic() - self.began) / made * (self.cell.config.train.steps - self.step)


@dataclass
class Pool:
    """Runs cells in processes of their own; what one of them does to itself stays its own."""

    cells: Sequence[Cell]
    launcher: Launcher
    retry: bool = False
    stop: Callable[[], int | None] = lambda: None
    show: Callable[[Sequence[Progress]], None] = lambda progress: None
    progress: list[Progress] = field(init=False)

    def __post_init__(self) -> None:
        self.progress = [Progress(cell, cell.state) for cell in self.cells]

    def run(self) -> list[Progress]:
        """Run what is not done, in order; returns when no process is left.

        A stop request is handed on to the running processes, which save and end.
        """
        waiting = [p for p in self.progress if self._wanted(p)]
        for entry in waiting:
            entry.state = "waiting"
        handed_on = False
        with self.launcher:
            try:
                while waiting or self._running():
                    number = self.stop()
                    if number and not handed_on:
                        handed_on = True
                        self._let_go(waiting)
                        for entry in self._running():
                            assert entry.process is not None
                            entry.process.send_signal(number)
                    while waiting and self._has_room(waiting[0]):
                        self._start(waiting.pop(0))
                    time.sleep(POLL_SECONDS)
                    for entry in self._running():
                        self._look_at(entry)
                    self.show(self.progress)
            finally:
                for entry in self._running():
                    assert entry.process is not None
                    entry.process.send_signal(signal.SIGKILL)
        return self.progress

    def _wanted(self, entry: Progress) -> bool:
        if entry.state in ("done", "diverged"):
            self._read(entry)
            return False
        return self.retry or entry.state not in RUN_AGAIN

    def _running(self) -> list[Progress]:
        return [p for p in self.progress if p.process is not None]

    def _has_room(self, entry: Progress) -> bool:
        return self.launcher.has_room(entry.cell, [p.cell for p in self._running()])

    def _let_go(self, waiting: list[Progress]) -> None:
        """What has not begun is as it was before."""
        for entry in waiting:
            entry.state = "interrupted" if entry.cell.folder.exists() else "new"
        waiting.clear()

    def _start(self, entry: Progress) -> None:
        self._read(entry)
        entry.first_step = entry.step
        entry.process = self.launcher.start(entry.cell)
        entry.state, entry.began = "running", time.monotonic()

    def _look_at(self, entry: Progress) -> None:
        assert entry.process is not None
        code = entry.process.poll()
        self._read(entry)
        if code is None:
            return
        said = entry.process.said().strip().splitlines()
        entry.process = None
        run = Run(entry.cell.folder.path)
        entry.state = run.state if run.folder.exists() else "failed"
        if entry.state not in ("done", "diverged", "interrupted", "out_of_memory"):
            entry.state = "failed"
        if code not in (0, 130, 143) and entry.state in ("interrupted", "failed"):
            entry.state = "failed"
            entry.message = said[-1] if said else f"ended with exit code {code}"

    def _read(self, entry: Progress) -> None:
        """Step, loss and model update from the last row on disk; no lock is needed for that."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            path = entry.cell.folder.steps_path
            with open(path, "rb") as file:
                names = file.readline().decode().strip().split(",")
                file.seek(max(0, path.stat().st_size - 2048))
                rows = file.read().split(b"\n")[:-1]  # what follows the last newline is torn
            row = dict(zip(names, rows[-1].decode().split(","), strict=True))
            entry.step, entry.loss = int(row["step"]), float(row["loss"])
            entry.model_update = float(row["model_update"])
