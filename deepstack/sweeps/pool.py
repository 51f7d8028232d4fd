"""Runs the cells of a plan in order, with any launcher, and skips finished ones."""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Protocol

from deepstack.base.errors import ResourceError
from deepstack.records import ENDED, Run, write_end
from deepstack.sweeps.plan import Cell, is_wanted

POLL_SECONDS = 0.1
# From the request to save and end to the kill: for a run over its time, for a sweep that stops.
GRACE_SECONDS = 30.0
STOP_GRACE_SECONDS = 120.0
# `train` ends with 128 + one of these after it has saved.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# ... and with one of these if it refused to begin or resume; its folder is then unchanged.
REFUSED = (2, 5, 6)


class Process(Protocol):
    """A run that was started."""

    def poll(self) -> int | None:
        """Return the exit code, negative for the signal that ended it; None while it runs.

        143 if its node or fork server was lost: the run is interrupted, not failed.
        """

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""

    def stderr_text(self) -> str:
        """Return its stderr."""


class Launcher(Protocol):
    """Starts each run in a separate process while there are resources for it."""

    def start(self, cell: Cell) -> Process | None:
        """Claim the cell's folder and start its run; return None if it has to wait for others."""

    def close(self) -> None:
        """End the remaining processes."""


@dataclass
class CellProgress:
    """The progress of one cell: its state, and its process while it runs.

    began, kill_at: times of the monotonic clock; at `kill_at` the process is killed.
    is_late: whether it was asked to end because of `run_timeout`.
    """

    cell: Cell
    state: str
    process: Process | None = None
    began: float = 0.0
    kill_at: float | None = None
    is_late: bool = False
    message: str = ""

    @property
    def step(self) -> int:
        """The last step in the run's log, which is read without a lock."""
        with suppress(ResourceError):
            return int(self.cell.folder.last_row().get("step", 0))
        return 0

    def ask_to_end(self, number: int, grace: float) -> None:
        """Send a signal to the process, which then has `grace` seconds to save and end."""
        if self.process is not None and self.kill_at is None:
            self.process.send_signal(number)
            self.kill_at = time.monotonic() + grace


@dataclass
class Pool:
    """Runs each cell in a separate process, so that a crash affects no other cell.

    retry: the states (failed, out_of_memory) that are run again.
    max_seconds: time limit, after which nothing new starts, and running cells save and end.
    run_timeout: seconds of one start of a run, which is then ended and counts as failed.
    pause: returns True once after Ctrl-Z: the runs stop, and continue with this process.
    may_start: whether further cells may start; while it says no, none starts, and if it still does
        when no run is left, the others are not started.
    """

    cells: Sequence[Cell]
    launcher: Launcher
    retry: Collection[str] = ()
    stop: Callable[[], int | None] = lambda: None
    show: Callable[[Sequence[CellProgress]], None] = lambda progress: None
    max_seconds: float | None = None
    run_timeout: float | None = None
    pause: Callable[[], bool] = lambda: False
    may_start: Callable[[Sequence[CellProgress]], bool] = lambda progress: True
    progress: list[CellProgress] = field(init=False)
    out_of_time: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.progress = [CellProgress(cell, cell.state) for cell in self.cells]
        for entry in self.progress:
            if entry.state == "damaged":
                entry.message = Run(entry.cell.folder.path).damage() or ""

    def run(self) -> list[CellProgress]:
        """Run the unfinished cells in order and return when no process is left.

        A request to stop is sent to the running processes, which save and end.
        """
        waiting = deque(entry for entry in self.progress if is_wanted(entry.cell, self.retry))
        for entry in waiting:
            entry.state = "waiting"
        began = time.monotonic()
        with closing(self.launcher):
            try:
                while waiting or self._running():
                    number = self.stop()
                    if self.max_seconds is not None:
                        self.out_of_time |= time.monotonic() - began >= self.max_seconds
                    if number or self.out_of_time:
                        self._drop(waiting)
                        for entry in self._running():
                            entry.ask_to_end(number or signal.SIGTERM, STOP_GRACE_SECONDS)
                    may_start = self.may_start(self.progress)
                    if not (may_start or self._running()):
                        self._drop(waiting)
                    while may_start and waiting and self._start(waiting[0]):
                        waiting.popleft()
                    time.sleep(POLL_SECONDS)
                    if self.pause():
                        self._pause()
                    for entry in self._running():
                        self._check(entry)
                    self.show(self.progress)
            finally:
                for entry in self._running():
                    assert entry.process is not None
                    entry.process.send_signal(signal.SIGKILL)
        return self.progress

    def _drop(self, waiting: deque[CellProgress]) -> None:
        """Give the cells that wait their former state; they are not started."""
        while waiting:
            entry = waiting.pop()
            entry.state = entry.cell.state

    def _pause(self) -> None:
        """Stop the runs and this process; continue them when a shell's `fg` continues it.

        The time in between counts for no limit of a single run.
        """
        for entry in self._running():
            assert entry.process is not None
            entry.process.send_signal(signal.SIGSTOP)
        before = time.monotonic()
        os.kill(os.getpid(), signal.SIGSTOP)
        paused = time.monotonic() - before
        for entry in self._running():
            assert entry.process is not None
            entry.process.send_signal(signal.SIGCONT)
            entry.began += paused
            entry.kill_at = None if entry.kill_at is None else entry.kill_at + paused

    def _running(self) -> list[CellProgress]:
        return [entry for entry in self.progress if entry.process is not None]

    def _start(self, entry: CellProgress) -> bool:
        """Start a run; return False if it has to wait."""
        try:
            entry.process = self.launcher.start(entry.cell)
        except ResourceError as error:  # locked, or no space for its files; the next cell may start
            entry.state, entry.message = "failed", str(error)
            return True
        if entry.process is not None:
            entry.state, entry.began = "running", time.monotonic()
        return entry.process is not None

    def _check(self, entry: CellProgress) -> None:
        """Record the end of a run, or ask one to end that is over its time."""
        assert entry.process is not None
        code, now = entry.process.poll(), time.monotonic()
        if code is not None:
            text, entry.process = entry.process.stderr_text(), None
            self._record_end(entry, code, error_line(text) or f"ended with exit code {code}")
        elif entry.kill_at is not None:
            if now > entry.kill_at:
                entry.process.send_signal(signal.SIGKILL)
        elif self.run_timeout is not None and now - entry.began > self.run_timeout:
            entry.is_late = True
            entry.ask_to_end(signal.SIGTERM, GRACE_SECONDS)

    def _record_end(self, entry: CellProgress, code: int, message: str) -> None:
        """Record how a run ended, here and, unless its process has done so, in its folder."""
        folder = entry.cell.folder
        entry.state = Run(folder.path).state if folder.exists() else "new"
        stopped = entry.kill_at is not None or {code - 128, -code} & {*STOP_SIGNALS}
        if entry.state in ENDED:
            return
        if entry.state == "out_of_memory":
            entry.message = message
        elif entry.is_late:
            self._fail(entry, f"took longer than --run-timeout, {self.run_timeout:g} s")
        elif stopped:
            entry.state = "interrupted" if entry.state == "running" else entry.state
        elif code < 0:
            self._fail(entry, f"killed by {signal.Signals(-code).name}")
        elif code in REFUSED or entry.state == "failed":  # the folder says why
            entry.message = message
            entry.state = "failed" if entry.state == "new" else entry.state
        else:  # also with code 0: something ended it before its last step
            self._fail(entry, message)

    def _fail(self, entry: CellProgress, why: str) -> None:
        """Record the failure in the run's folder too, unless another process holds the folder."""
        entry.state, entry.message = "failed", why
        folder = entry.cell.folder
        try:
            with folder.lock():
                entry.cell.write_config()
                write_end(folder, "failed", entry.step, error=why)
        except ResourceError as error:
            entry.message = f"{why}; its folder could not be told: {error}"


def error_line(stderr: str) -> str:
    """Return the error of a process in one line: the last message of deepstack, or the last line.

    A message is all text after `deepstack: ` at the start of a line.
    """
    _, is_message, text = f"\n{stderr}".rpartition("\ndeepstack: ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines if is_message else lines[-1:])
