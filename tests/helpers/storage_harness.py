"""Runs a training, stops it in every way, lets it go on, and compares with one left alone.

harness.run(out, KILL_BEFORE, 17)      one process, watched
harness.reference                      the files that every run must come to
harness.go_on(out, least=4)            the problems once it has gone on, in words
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from helpers import ROOT, TESTS, storage_calls
from helpers.extensions import has
from helpers.storage_calls import WATCH, Call, read_trace
from helpers.storage_disk import Disk, read_in
from helpers.storage_run import INTERVAL, STEPS, Job, work

CONTEXT = multiprocessing.get_context("forkserver")
LOGS = ("steps.csv", "evals.csv", *(["attribution.csv"] if has("attribution") else []))


@cache
def start_server() -> None:
    """Start the process that has imported everything, once for all tests of this process."""
    scratch = tempfile.TemporaryDirectory(prefix="storage-")
    atexit.register(scratch.cleanup)
    CONTEXT.set_forkserver_preload(["pytest", "helpers.storage_run"])
    variables = {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)]),
        "STORAGE_LIBRARY": str(storage_calls.build(Path(scratch.name))),
    }
    with patch.dict(os.environ, variables):
        first = CONTEXT.Process(target=time.monotonic)
        first.start()
    first.join()  # the server forks it once it has imported everything


@dataclass(frozen=True)
class Ended:
    """How a process ended: exit code, messages on stderr, duration, calls that change files."""

    code: int
    stderr: str
    seconds: float
    calls: list[Call]

    @property
    def first(self) -> int | None:
        """The first step that it trained; STEPS + 1 where none was left; None if it never began."""
        firsts = [-call.place for call in self.calls if call.kind == "mark" and call.place < 0]
        return firsts[0] if firsts else (STEPS + 1 if self.code == 0 else None)

    @property
    def promised(self) -> int:
        """The step of the last checkpoint that it had saved, 0 for none."""
        return max([0, *(call.place for call in self.calls if call.kind == "mark")])

    @property
    def count(self) -> int:
        """How many calls changed a file."""
        return max((call.number for call in self.calls), default=0)


@dataclass
class Harness:
    """A training, its folders, and their expected end.  settings: `key=value` of its config."""

    scratch: Path
    settings: tuple[str, ...] = ()
    planted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        start_server()

    def with_fault(self, name: str) -> Harness:
        """The same with a fault of storage_faults planted, and the reference without it."""
        other = replace(self, scratch=self.scratch / name, planted=(name,))
        vars(other)["reference"] = self.reference
        return other

    def new(self) -> Path:
        """An empty folder."""
        self.scratch.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self.scratch)).resolve()

    def job(
        self, out: Path, mode: int | None = WATCH, number: int = 0, error: int = 0, **more: Any
    ) -> Job:
        """A job in a folder; `more` are further fields of `Job`."""
        files = self.new()
        watch = mode, number, error
        return Job(
            out, files / "errors", files / "trace", *watch, self.settings, self.planted, **more
        )

    def run_all(
        self, jobs: Sequence[Job], *, sent: Sequence[tuple[float, int]] = (), holds: bool = False
    ) -> list[Ended]:
        """Several processes at once.

        sent: seconds and number of signals to the first.  holds: whether the last one works until
        it gets a SIGTERM.
        """
        began, seconds = time.monotonic(), dict[ForkServerProcess, float]()
        left = [CONTEXT.Process(target=work, args=(job,)) for job in jobs]
        processes = list(left)
        for process in processes:
            process.start()
        for after, number in sent:
            processes[0].join(max(0.0, began + after - time.monotonic()))
            kill(processes[0], number)
        while left:
            if holds and len(left) == 1:
                kill(left[0], signal.SIGTERM)
            connection.wait([process.sentinel for process in left])
            for process in [process for process in left if not process.is_alive()]:
                seconds[process] = time.monotonic() - began
                left.remove(process)
        return [
            read_end(job, process.exitcode, seconds[process])
            for job, process in zip(jobs, processes, strict=True)
        ]

    def run(
        self, out: Path, *watch: Any, sent: Sequence[tuple[float, int]] = (), **more: Any
    ) -> Ended:
        """One process, from its start to its end; arguments as of `job` and `run_all`."""
        return self.run_all([self.job(out, *watch, **more)], sent=sent)[0]

    @cached_property
    def alone(self) -> Ended:
        """How a run ended that nothing stopped, with the planted faults."""
        ended = self.run(self.new())
        assert ended.code == 0, ended.stderr
        return ended

    @cached_property
    def reference(self) -> dict[str, bytes]:
        """The files of an undisturbed run, which all others must equal byte for byte."""
        out = self.new()
        assert self.run(out).code == 0
        return compared(out)

    def wrong_moments(self, start: Disk, calls: Sequence[Call]) -> list[str]:
        """Return the problems of the logs before and after each of these calls.

        Each must be a prefix, but for zeros that a power cut has left at its end, and never shrink.
        """
        for call in calls:
            name, is_log = call.path.name, call.path.name in LOGS
            before = start.read(call.path).rstrip(b"\0") if is_log else b""
            start.follow(call)
            after = start.read(call.path).rstrip(b"\0") if is_log else b""
            if is_log and not all(map(self.reference[name].startswith, (before, after))):
                return [f"{name} is no prefix of the reference after {call.kind}"]
            if len(after) < len(before):
                return [f"{name} shrinks"]
        return []

    def go_on(self, out: Path, least: int, tidy: bool = True) -> list[str]:
        """Run again to the end; return the problems of the run and of its files.

        least: the step of the last checkpoint that it must not fall behind.  tidy: whether no
        other checkpoint than the last may be left.
        """
        rows = rows_of(out)
        disk, ended = Disk(out), self.run(out)
        wrong = self.wrong_moments(disk, ended.calls)
        # The trace must be complete: applied to the folder before, it gives the folder afterwards.
        if disk.after_cut("now") != read_in(out):
            wrong.append("the trace of calls does not tell what is in the folder")
        if ended.code:
            return [*wrong, f"exit {ended.code} when run again: {ended.stderr.strip()}"]
        for log in out.glob("*/*/log.txt"):  # the command is quiet
            messages = log.read_text(errors="replace").splitlines()
            damage = [line for line in messages if "not used" in line or "starting again" in line]
            wrong += [f"something was damaged: {line}" for line in damage]
        assert ended.first is not None
        if ended.first - 1 < least:
            wrong.append(f"went on at step {ended.first} though step {least} was saved")
        if rows - (ended.first - 1) > INTERVAL:
            wrong.append(f"went on at step {ended.first} with {rows} rows on disk")
        left = sorted(path.name for path in out.glob("*/*/checkpoint/*"))
        if tidy and left != [str(STEPS)]:
            wrong.append(f"checkpoints {left} are left of a run that is done")
        return wrong + self.different(out)

    def different(self, out: Path) -> list[str]:
        """Return the differences from the undisturbed run."""
        files = compared(out)
        return [
            f"{name} is not that of the run left alone"
            for name in sorted({*files, *self.reference})
            if files.get(name) != self.reference.get(name)
        ]


def kill(process: ForkServerProcess, number: int) -> None:
    """Send a signal, unless the process has ended."""
    if process.is_alive():
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def read_end(job: Job, code: int | None, seconds: float) -> Ended:
    """How a job ended; its files are removed."""
    assert code is not None
    # A kill may have come before there is a file.
    messages = job.errors.read_text(errors="replace") if job.errors.exists() else ""
    calls = read_trace(job.trace) if job.trace.exists() else []
    shutil.rmtree(job.trace.parent)
    return Ended(code, messages, seconds, calls)


def compared(out: Path) -> dict[str, bytes]:
    """The files of the one run below `out` that must be equal, by their name in its folder."""
    found: dict[str, bytes] = {}
    for run in out.glob("*/*/"):
        paths = [run / name for name in LOGS]
        paths += (run / "layers").glob("*.npy")
        steps = sorted(int(path.name) for path in (run / "checkpoint").glob("[0-9]*"))
        paths += [run / "checkpoint" / f"{step}" / "weights.safetensors" for step in steps[-1:]]
        found |= {str(path.relative_to(run)): path.read_bytes() for path in paths if path.exists()}
    return found


def rows_of(out: Path) -> int:
    """Complete rows of steps.csv on disk."""
    return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in out.glob("*/*/steps.csv"))
