"""Runs the cells of a plan in order, with any launcher, and skips finished ones."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

from deepstack.errors import ResourceError
from deepstack.records import ENDED, Run
from deepstack.sweeps.launcher import Launcher, Process
from deepstack.sweeps.plan import Cell, is_wanted

POLL_SECONDS = 0.1
# From the request to save and end to the kill: for a run over its time, for a sweep that stops.
GRACE_SECONDS = 30.0
STOP_GRACE_SECONDS = 120.0
# `train` ends with 128 + one of these after it has saved.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# ... and with one of these if it refused to begin or resume; its folder is then unchanged.
REFUSED = (2, 5, 6)


@dataclass
class Progress:
    """The progress of one cell: the content of its folder, and its process while it runs.

    began, ended: seconds of the monotonic clock.  kill_at: when it is killed if it has not ended.
    """

    cell: Cell
    state: str
    process: Process | None = None
    began: float = 0.0
    ended: float = 0.0
    kill_at: float | None = None
    late: bool = False
    step: int = 0
    loss: float | None = None
    model_update: float | None = None
    message: str = ""
    first_step: int = 0

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the steps of this process; None before its first one."""
        steps = self.step - self.first_step
        if self.process is None or steps <= 0:
            return None
        return (time.monotonic() - self.began) / steps * (self.cell.config.train.steps - self.step)


@dataclass
class Pool:
    """Runs each cell in a separate process, so that a crash affects no other cell.

    retry: the states (failed, out_of_memory) that are run again.
    max_seconds: time limit, after which nothing new starts, and running cells save and end.
    run_timeout: seconds of one start of a run, which is then ended and counts as failed.
    """

    cells: Sequence[Cell]
    launcher: Launcher
    retry: Collection[str] = ()
    stop: Callable[[], int | None] = lambda: None
    show: Callable[[Sequence[Progress]], None] = lambda progress: None
    max_seconds: float | None = None
    run_timeout: float | None = None
    progress: list[Progress] = field(init=False)
    out_of_time: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.progress = [Progress(cell, cell.state) for cell in self.cells]
        for entry in self.progress:
            self._read(entry)
            entry.first_step = entry.step
            if entry.state == "damaged":
                entry.message = Run(entry.cell.folder.path).damage() or ""

    def run(self) -> list[Progress]:
        """Run the unfinished cells in order and return when no process is left.

        A request to stop is sent to the running processes, which save and end.
        """
        waiting = [entry for entry in self.progress if is_wanted(entry.cell, self.retry)]
        for entry in waiting:
            entry.state = "waiting"
        began, stopping = time.monotonic(), False
        with closing(self.launcher):
            try:
                while waiting or self._running():
                    number = self.stop()
                    if self.max_seconds is not None:
                        self.out_of_time |= time.monotonic() - began >= self.max_seconds
                    if (number or self.out_of_time) and not stopping:
                        stopping = True
                        for entry in waiting:
                            entry.state = entry.cell.state
                        waiting.clear()
                        for entry in self._running():
                            self._end(entry, number or signal.SIGTERM, STOP_GRACE_SECONDS)
                    while waiting and self._has_capacity(waiting[0]):
                        self._start(waiting.pop(0))
                    time.sleep(POLL_SECONDS)
                    for entry in self._running():
                        self._check(entry)
                    self.show(self.progress)
            finally:
                for entry in self._running():
                    assert entry.process is not None
                    entry.process.send_signal(signal.SIGKILL)
        return self.progress

    def _running(self) -> list[Progress]:
        return [p for p in self.progress if p.process is not None]

    def _has_capacity(self, entry: Progress) -> bool:
        return self.launcher.has_capacity(entry.cell, [p.cell for p in self._running()])

    def _start(self, entry: Progress) -> None:
        with suppress(ResourceError):  # the run itself will report it
            entry.cell.claim()
        try:
            entry.process = self.launcher.start(entry.cell)
        except ResourceError as error:  # no space for temporary files; the next cell may have it
            entry.state, entry.message = "failed", str(error)
            return
        entry.state, entry.began = "running", time.monotonic()

    def _end(self, entry: Progress, number: int, grace: float) -> None:
        """Ask a run to save and end; it is killed after `grace` seconds."""
        if entry.process is not None and entry.kill_at is None:
            entry.process.send_signal(number)
            entry.kill_at = time.monotonic() + grace

    def _check(self, entry: Progress) -> None:
        assert entry.process is not None
        code = entry.process.poll()
        self._read(entry)
        now = time.monotonic()
        if code is not None:
            self._record_end(entry, code)
        elif entry.kill_at is not None:
            if now > entry.kill_at:
                entry.process.send_signal(signal.SIGKILL)
        elif self.run_timeout is not None and now - entry.began > self.run_timeout:
            entry.late = True
            self._end(entry, signal.SIGTERM, GRACE_SECONDS)

    def _record_end(self, entry: Progress, code: int) -> None:
        """Record how a run ended, here and in its folder."""
        assert entry.process is not None
        message = error_line(entry.process.stderr_text()) or f"ended with exit code {code}"
        entry.process, entry.ended = None, time.monotonic()
        run = Run(entry.cell.folder.path)
        exists = run.folder.exists()
        entry.state = run.state if exists else "new"
        stopped = code - 128 in STOP_SIGNALS or -code in STOP_SIGNALS
        if entry.state in ENDED:
            return
        if entry.state == "out_of_memory":
            entry.message = message
        elif entry.late:
            self._fail(entry, f"took longer than --run-timeout, {self.run_timeout:g} s")
        elif entry.kill_at is not None or stopped:
            entry.state = "interrupted" if entry.state == "running" else entry.state
        elif code < 0:
            self._fail(entry, f"killed by {signal.Signals(-code).name}")
        elif code in REFUSED or entry.state == "failed":  # the folder says why
            entry.message = message
            entry.state = entry.state if exists else "failed"
        else:  # also with code 0: something ended it before its last step
            self._fail(entry, message)

    def _fail(self, entry: Progress, why: str) -> None:
        """Record the failure in the run's folder too, unless another process holds the folder."""
        entry.state, entry.message = "failed", why
        folder = entry.cell.folder
        try:
            with folder.lock():
                entry.cell.write_config()
                folder.write_status("failed", entry.step, error=why)
        except ResourceError as error:
            entry.message = f"{why}; its folder could not be told: {error}"

    def _read(self, entry: Progress) -> None:
        """Read step, loss and model update from the last row on disk, which needs no lock."""
        with suppress(ValueError, ResourceError, KeyError):
            row = entry.cell.folder.last_row()
            loss, update = float(row["loss"]), float(row["model_update"])
            entry.step, entry.loss, entry.model_update = int(row["step"]), loss, update


def error_line(stderr: str) -> str:
    """Return the error of a process in one line, from its stderr.

    It is the last message of deepstack, or the text below the last traceback.
    """
    lines = stderr.strip().splitlines()
    messages = [i for i, line in enumerate(lines) if line.startswith("deepstack: ")]
    indented = [i for i, line in enumerate(lines[:-1]) if line.startswith("  ")]
    after_traceback = indented[-1] + 1 if any(line.startswith("Traceback") for line in lines) else 0
    first = max(messages[-1:], default=after_traceback or len(lines) - 1)
    return "; ".join(line.strip() for line in lines[max(first, 0) :] if line.strip())
