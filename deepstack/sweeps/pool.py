"""The runs of a plan, in order, wherever a launcher starts them; nothing done twice."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from deepstack import config as conf
from deepstack.errors import ResourceError
from deepstack.model import with_defaults
from deepstack.records import Run, RunFolder
from deepstack.sweeps.launcher import Launcher, Process
from deepstack.sweeps.plan import FINISHED, Cell, is_wanted

POLL_SECONDS = 0.1
# From the request to save and end to the kill: of a run that took too long, of a sweep that stops.
GRACE_SECONDS = 30.0
STOP_GRACE_SECONDS = 120.0
# `train` ends with 128 + one of these after it has saved.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# ... and when it refused to begin or go on; the folder then says what it said before.
REFUSED = (2, 5, 6)


@dataclass
class Progress:
    """One cell while the sweep goes on: what its folder says, and its process while it has one.

    began, ended: seconds of the monotonic clock.  ending: when it is killed if it has not ended.
    """

    cell: Cell
    state: str
    process: Process | None = None
    began: float = 0.0
    ended: float = 0.0
    ending: float | None = None
    late: bool = False
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
    """Runs cells in processes of their own; what one of them does to itself stays its own.

    retry: the states (failed, out_of_memory) that are run again.  max_seconds: after them nothing
    new starts, and what runs is asked to save and end.  run_timeout: seconds of wall-clock time
    after which a run that was started is ended and counts as failed.
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
            if entry.state == "damaged":
                entry.message = Run(entry.cell.folder.path).damage() or ""

    def run(self) -> list[Progress]:
        """Run what is not done, in order; returns when no process is left.

        A stop request is handed on to the running processes, which save and end.
        """
        waiting = [p for p in self.progress if self._wanted(p)]
        for entry in waiting:
            entry.state = "waiting"
        if not waiting:
            return self.progress
        began, stopping = time.monotonic(), False
        with self.launcher:
            try:
                while waiting or self._running():
                    number = self.stop() or self._time_is_up(began)
                    if number and not stopping:
                        stopping = True
                        self._let_go(waiting)
                        for entry in self._running():
                            self._end(entry, number, STOP_GRACE_SECONDS)
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
        if entry.state in FINISHED:
            self._read(entry)
        return is_wanted(entry.cell, self.retry)

    def _time_is_up(self, began: float) -> int | None:
        if self.max_seconds is None or time.monotonic() - began < self.max_seconds:
            return None
        self.out_of_time = True
        return signal.SIGTERM

    def _running(self) -> list[Progress]:
        return [p for p in self.progress if p.process is not None]

    def _has_room(self, entry: Progress) -> bool:
        return self.launcher.has_capacity(entry.cell, [p.cell for p in self._running()])

    def _let_go(self, waiting: list[Progress]) -> None:
        """What has not begun is as it was before."""
        for entry in waiting:
            entry.state = entry.cell.state
        waiting.clear()

    def _start(self, entry: Progress) -> None:
        self._read(entry)
        entry.first_step = entry.step
        with contextlib.suppress(ResourceError):  # the run will say so itself
            entry.cell.claim()
        try:
            entry.process = self.launcher.start(entry.cell)
        except ResourceError as error:  # no space for its temporary files: the next may have some
            entry.state, entry.message = "failed", str(error)
            return
        entry.state, entry.began = "running", time.monotonic()

    def _end(self, entry: Progress, number: int, grace: float) -> None:
        """Ask a run to save and end; after the grace it is killed."""
        if entry.process is not None and entry.ending is None:
            entry.process.send_signal(number)
            entry.ending = time.monotonic() + grace

    def _look_at(self, entry: Progress) -> None:
        assert entry.process is not None
        code = entry.process.poll()
        self._read(entry)
        now = time.monotonic()
        if code is not None:
            self._ended(entry, code)
        elif entry.ending is not None:
            if now > entry.ending:
                entry.process.send_signal(signal.SIGKILL)
        elif self.run_timeout is not None and now - entry.began > self.run_timeout:
            entry.late = True
            self._end(entry, signal.SIGTERM, GRACE_SECONDS)

    def _ended(self, entry: Progress, code: int) -> None:
        """Say how a run ended, and let its folder say the same."""
        assert entry.process is not None
        said = last_words(entry.process.stderr_text()) or f"ended with exit code {code}"
        entry.process, entry.ended = None, time.monotonic()
        run = Run(entry.cell.folder.path)
        there = run.folder.exists()
        entry.state = run.state if there else "new"
        asked = code - 128 in STOP_SIGNALS or -code in STOP_SIGNALS
        if entry.state in FINISHED:
            return
        if entry.state == "out_of_memory":
            entry.message = said
            return
        if entry.late:
            self._failed(entry, f"took longer than --run-timeout, {self.run_timeout:g} s")
        elif entry.ending is not None or asked:
            entry.state = "interrupted" if entry.state == "running" else entry.state
        elif code < 0:
            self._failed(entry, f"killed by {signal.Signals(-code).name}")
        elif code in REFUSED:
            entry.message = said
            entry.state = entry.state if there else "failed"
        else:  # with code 0, something has ended it in the midst of training
            self._failed(entry, said, known=entry.state == "failed")

    def _failed(self, entry: Progress, why: str, known: bool = False) -> None:
        """Write it to the run's folder too, unless it says so or somebody else works there."""
        entry.state, entry.message = "failed", why
        folder = entry.cell.folder
        if known:
            return
        try:
            with folder.lock():
                if not folder.exists():
                    folder.write_config(conf.to_yaml(with_defaults(entry.cell.config)))
                folder.write_status("failed", entry.step, error=why)
        except ResourceError as error:
            entry.message = f"{why}; its folder could not be told: {error}"

    def _read(self, entry: Progress) -> None:
        """Step, loss and model update from the last row on disk; no lock is needed for that."""
        with contextlib.suppress(ValueError, ResourceError):
            entry.step, entry.loss, entry.model_update = last_row(entry.cell.folder)


def last_words(said: str) -> str:
    """The error that a process ended with, in one line, from what it wrote to stderr.

    It is what deepstack says at the end, or what stands below the last traceback.
    """
    lines = said.strip().splitlines()
    begins = [i for i, line in enumerate(lines) if line.startswith("deepstack: ")]
    indented = [i for i, line in enumerate(lines[:-1]) if line.startswith("  ")]
    traced = indented[-1] + 1 if any(line.startswith("Traceback") for line in lines) else 0
    first = max(begins[-1:], default=traced or len(lines) - 1)
    return "; ".join(line.strip() for line in lines[max(first, 0) :] if line.strip())


def last_row(folder: RunFolder) -> tuple[int, float, float]:
    """(step, loss, model update) of the last whole row of steps.csv; ValueError for none."""
    row = folder.last_row()
    if not {"loss", "model_update"} <= row.keys():
        raise ValueError(f"{folder.steps_path}: no whole row")
    return int(row["step"]), float(row["loss"]), float(row["model_update"])
