"""Runs a trainer, stops it in every way, lets it go on, and compares with one left alone.

harness.run(out, KILL_BEFORE, 17)      one process, watched
harness.reference                      what it must all come to
harness.go_on(out, least=4)            what is wrong once it has gone on, in words
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from helpers import ROOT, TESTS, storage_calls
from helpers.storage_calls import WATCH, Call, read_trace
from helpers.storage_disk import Disk, read_in
from helpers.storage_trainers import INTERVAL, STEPS

LOGS = ("steps.csv", "evals.csv", "attribution.csv")


class Server:
    """The process that has imported everything (storage_server.py)."""

    def __init__(self, scratch: Path) -> None:
        library = storage_calls.build(scratch)
        self.config = scratch / "small.yaml"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "helpers.storage_server", str(library), str(self.config)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def run(self, jobs: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
        """Run jobs at once: exit code and seconds of each."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(list(jobs)) + "\n")
        self._process.stdin.flush()
        return [(code, seconds) for code, seconds in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@cache
def the_server() -> Server:
    """One for all tests of this process."""
    scratch = tempfile.TemporaryDirectory(prefix="storage-")
    server = Server(Path(scratch.name))
    atexit.register(scratch.cleanup)
    atexit.register(server.close)
    return server


@dataclass(frozen=True)
class Ended:
    """How a process ended: exit code, what it said on stderr, which calls it made."""

    code: int
    said: str
    seconds: float
    told: list[dict[str, Any]]
    calls: list[Call]

    @property
    def first(self) -> int | None:
        """The first step that it trained; STEPS + 1 where none was left; None if it never began."""
        firsts = [line["first"] for line in self.told if "first" in line]
        return firsts[0] if firsts else (STEPS + 1 if self.code == 0 else None)

    @property
    def promised(self) -> int:
        """The step of the last checkpoint that it had saved."""
        return promised(self.calls)

    @property
    def count(self) -> int:
        """How many calls changed a file."""
        return max((call.number for call in self.calls), default=0)


def promised(calls: Sequence[Call]) -> int:
    """The step of the last checkpoint that was saved within these calls, 0 for none."""
    return max((call.place for call in calls if call.kind == "mark"), default=0)


@dataclass
class Harness:
    """A trainer, its folders, and what they must come to."""

    server: Server
    scratch: Path
    trainer: str = "dummy"
    arguments: tuple[Any, ...] = ()
    planted: tuple[str, ...] = ()
    trials: int = 0
    _made: int = field(default=0, repr=False)

    def with_fault(self, name: str) -> Harness:
        """The same with a fault of storage_faults planted, and the reference without it."""
        other = replace(self, scratch=self.scratch / name, planted=(name,), trials=0)
        vars(other)["whole"] = self.whole
        return other

    def new(self) -> Path:
        """An empty folder."""
        self._made += 1
        made = self.scratch / f"{self._made}"
        made.mkdir(parents=True)
        return made.resolve()

    def job(
        self, out: Path, mode: int | None = WATCH, number: int = 0, error: int = 0, **also: Any
    ) -> Any:
        """What the server is asked to run; `also` as in storage_server.py."""
        self._made += 1
        self.scratch.mkdir(parents=True, exist_ok=True)
        beside = self.scratch / f"{self._made}"
        names = {name: f"{beside}.{name}" for name in ("errors", "report", "trace")}
        return {
            "trainer": self.trainer, "arguments": self.arguments, "planted": self.planted,
            "out": str(out), "mode": mode, "number": number, "error": error, **names, **also,
        }  # fmt: skip

    def run_all(self, jobs: Sequence[dict[str, Any]]) -> list[Ended]:
        """Several processes at once."""
        found = []
        for job, (code, seconds) in zip(jobs, self.server.run(jobs), strict=True):
            errors, report, trace = (Path(job[name]) for name in ("errors", "report", "trace"))
            told = report.read_text().splitlines() if report.exists() else []
            calls = read_trace(trace) if trace.exists() else []
            # A kill may have come before there is a file, or have torn its last line.
            said = errors.read_text(errors="replace") if errors.exists() else ""
            lines = [json.loads(line) for line in told if line.endswith("}")]
            found.append(Ended(code, said, seconds, lines, calls))
            for path in (errors, report, trace):
                path.unlink(missing_ok=True)
        return found

    def run(self, out: Path, *watch: Any, **also: Any) -> Ended:
        """One process, from its start to its end; arguments as of `job`."""
        self.trials += 1
        return self.run_all([self.job(out, *watch, **also)])[0]

    @cached_property
    def whole(self) -> tuple[Path, Ended]:
        """A folder that was left alone, and how that went."""
        out = self.new()
        ended = Harness(self.server, self.scratch / "whole", self.trainer, self.arguments).run(out)
        assert ended.code == 0, ended.said
        return out, ended

    @cached_property
    def reference(self) -> dict[str, bytes]:
        """The files that must be equal, byte for byte."""
        return compared(self.whole[0])

    @cached_property
    def alone(self) -> Ended:
        """How a run goes that nothing happens to, but for what is planted."""
        if not self.planted:
            return self.whole[1]
        out = self.new()
        ended = self.run(out)
        assert ended.code == 0, ended.said
        self.drop(out)
        return ended

    @property
    def logs(self) -> dict[str, bytes]:
        """The logs of the run that was left alone."""
        return {name: data for name, data in self.reference.items() if name in LOGS}

    def wrong_now(self, out: Path) -> list[str]:
        """What is wrong with the logs of a run that is not done: each must be a prefix."""
        return [
            f"{path.name} is no prefix of the reference"
            for path in out.glob("*/*/*.csv")
            if path.name in LOGS and not self.logs[path.name].startswith(rows_in(path.read_bytes()))
        ]

    def wrong_moments(self, start: Disk, calls: Sequence[Call]) -> list[str]:
        """The same at every moment between these calls, and that no log ever shrinks."""
        size: dict[Path, int] = {}
        for call in calls:
            name = call.path.relative_to(start.path) if call.path.is_absolute() else Path()
            if name.name in LOGS and name not in size:
                size[name] = len(rows_in(start.after_cut("now").get(name)))
            start.follow(call)
            if name.name not in LOGS or call.failed or call.kind == "sync":
                continue
            found = rows_in(start.after_cut("now").get(name))
            if not self.logs[name.name].startswith(found):
                return [f"{name.name} is no prefix of the reference after {call.kind}"]
            if len(found) < size[name]:
                return [f"{name.name} shrinks"]
            size[name] = len(found)
        return []

    def go_on(self, out: Path, least: int, tidy: bool = True) -> list[str]:
        """Run again to the end; what is wrong with how it went or what it came to.

        least: the step of the last checkpoint that it must not fall behind.  tidy: whether no
        other checkpoint than the last may be left.
        """
        rows = rows_of(out)
        wrong, disk, ended = self.wrong_now(out), Disk(out), self.run(out)
        wrong += self.wrong_moments(disk, ended.calls)
        # The trace must tell all: what it makes of the folder before is the folder afterwards.
        if disk.after_cut("now") != read_in(out):
            wrong.append("the trace of calls does not tell what is in the folder")
        if ended.code:
            return [*wrong, f"exit {ended.code} when run again: {ended.said.strip()}"]
        if "not used" in ended.said or "starting again" in ended.said:
            wrong.append(f"something was damaged: {ended.said.strip()}")
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
        """What differs from the run that was left alone."""
        found = compared(out)
        names = sorted({*found, *self.reference})
        return [
            f"{name} is not that of the run left alone"
            for name in names
            if found.get(name) != self.reference.get(name)
        ]

    def drop(self, *folders: Path) -> None:
        """Remove folders of a trial that went well."""
        for folder in folders:
            shutil.rmtree(folder)


def rows_in(data: bytes | None) -> bytes:
    """A log without the zeros that a power cut may have left at its end."""
    return (data or b"").rstrip(b"\0")


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
