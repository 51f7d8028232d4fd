"""Starts runs at once: a process that has imported everything forks one for each.

Importing torch takes longer than training a small network.  The starter, a process of one thread
that only imports and forks, pays for that once a sweep; each run is still a process of its own, the
same `deepstack train` with the same arguments.

    Starter (in the sweep) -- lines of JSON --> serve() (in the starter) -- fork --> a run

A run ends as it would after a SIGTERM, saving what it has, when its sweep or the starter is gone:
the starter hears it by the end of its input, a run by the kernel's word of its parent's death.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

LOOK_SECONDS = 0.05
PR_SET_PDEATHSIG = 1
# What `deepstack train` imports, by name: the command line is a floor above this one.
IMPORTED = ("deepstack.training", "deepstack.cli", "deepstack.cli.display", "deepstack.cli.signals")


class Starter:
    """Starts `deepstack <words>` in processes forked from one that has imported it already.

    Close it, or leave its `with` block, when no run is left: what still runs then saves and ends.
    """

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", "from deepstack.sweeps.starter import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A Ctrl-C on the terminal reaches the sweep, which hands it on: once.
            start_new_session=True,
        )
        assert self._server.stdout is not None
        os.set_blocking(self._server.stdout.fileno(), False)
        self._torn = b""
        self._started: list[Process] = []
        self._ended: dict[int, int] = {}
        self._closed = False

    def __enter__(self) -> Starter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, words: Sequence[str], errors: Path, environment: Mapping[str, str]) -> Process:
        """Start `deepstack <words>`, its stderr in a file, with these environment variables added.

        Its working directory and the rest of its environment are those of the sweep.
        """
        process = Process(self, len(self._started), errors)
        self._started.append(process)
        self.ask(words=list(words), errors=str(errors), environment=dict(environment))
        return process

    def ask(self, **request: Any) -> None:
        """Send a line to the starter; one that has died is found out by `code_of`."""
        assert self._server.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.write(json.dumps(request).encode() + b"\n")
            self._server.stdin.flush()

    def code_of(self, number: int) -> int | None:
        """Exit code of the run of that number, negative for a signal; None while it runs."""
        dead = self._server.poll()
        if not self._closed:
            self._listen()
        if number not in self._ended and dead is not None:
            # The kernel has told the runs to save and end; how each ended nobody knows.
            return dead or 1
        return self._ended.get(number)

    def close(self) -> None:
        """End the starter, and by that the runs that are left."""
        assert self._server.stdin is not None and self._server.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._server.stdin.close()
        self._server.wait()
        self._listen()
        self._server.stdout.close()
        self._closed = True

    def _listen(self) -> None:
        assert self._server.stdout is not None
        while said := self._server.stdout.read(65536):
            *lines, self._torn = (self._torn + said).split(b"\n")
            for line in lines:
                number, code = json.loads(line)
                self._ended[number] = code


class Process:
    """A run that a `Starter` started."""

    def __init__(self, starter: Starter, number: int, errors: Path) -> None:
        self._starter, self._number, self._errors = starter, number, errors

    def poll(self) -> int | None:
        """Exit code, negative for the signal that ended it; None while it runs."""
        return self._starter.code_of(self._number)

    def said(self) -> str:
        """What it wrote to stderr."""
        try:
            return self._errors.read_text(errors="replace")
        except FileNotFoundError:  # its process could not even be started
            return ""

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended; never to another process of the same id."""
        self._starter.ask(signal=number, run=self._number)


def serve() -> NoReturn:
    """The starter: fork a run for every line of input, say the exit code of each that ends.

    A line is {"words", "errors", "environment"} for the next run, or {"signal", "run"}.
    """
    for module in IMPORTED:
        import_module(module)
    gc.collect()
    gc.freeze()  # shared with the runs, never written to by a collection of theirs
    runs: dict[int, int] = {}
    begun, torn, listening = 0, b"", True
    while listening or runs:
        if select.select([0] if listening else [], [], [], LOOK_SECONDS)[0]:
            said = os.read(0, 65536)
            listening = bool(said)
            *lines, torn = (torn + said).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if "words" in request:
                    runs[fork(**request)] = begun
                    begun += 1
                else:
                    _signal([pid for pid, run in runs.items() if run == request["run"]],
                            request["signal"])  # fmt: skip
            if not listening:
                _signal(runs, signal.SIGTERM)
        while runs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended = [runs.pop(pid), os.waitstatus_to_exitcode(status)]
            with contextlib.suppress(BrokenPipeError):
                os.write(1, json.dumps(ended).encode() + b"\n")
    os._exit(0)


def _signal(pids: Iterable[int], number: int) -> None:
    """Only to children that have not been waited for: their ids cannot be another's."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def fork(words: Sequence[str], errors: str, environment: Mapping[str, str]) -> int:
    """The process id of a new run."""
    starter = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setsid()
        end_with_parent(starter)
        for number, path, flags in (
            (0, os.devnull, os.O_RDONLY),
            (1, os.devnull, os.O_WRONLY),
            (2, errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        ):
            opened = os.open(path, flags, 0o644)
            os.dup2(opened, number)
            os.close(opened)
        os.environ.update(environment)
        sys.argv = ["deepstack", *words]
        code = run()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def run() -> int:
    """`python -m deepstack` with the arguments of this process; its exit code."""
    try:
        runpy.run_module("deepstack", run_name="__main__")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def end_with_parent(parent: int) -> None:
    """Let the kernel send SIGTERM to this process when its parent is gone (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)
