"""Processes that train the runs of a sweep: a worker takes one run, or one after the other.

A process opens CUDA, compiles layers and makes kernels once.  A worker that is kept does so for all
its runs.  It ends after a run with another exit code than 0, so that no crash, lack of memory or
interruption reaches the next run.  The numbers of a run do not depend on earlier ones.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from deepstack.base.ending import SIGNALS, die_with

# The least that any limit leaves, because libraries and their threads must start.
LEAST_BYTES = 64 * 2**20
OF_THE_GROUP = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)
"""Signals that go to the processes that a run has started, such as a compiler, too."""


class Worker:
    """A process, forked from this one, that executes `deepstack train` for each request.

    program: called for each run with the arguments in sys.argv.
    others: connections of other workers, which this one must not hold.
    """

    def __init__(self, program: Callable[[], None], others: Sequence[Connection]) -> None:
        self.connection, end = Pipe()
        inherited = [self.connection, *others]
        self.process = ForkProcess(target=work, args=(program, os.getpid(), end, inherited))
        self.process.start()
        end.close()
        self.environment: Mapping[str, str] = {}

    def assign(self, request: Mapping[str, Any]) -> None:
        """Send a run; a worker that has just died reports by its exit code."""
        self.environment = request["environment"]
        with suppress(ConnectionError):
            self.connection.send_bytes(json.dumps(request).encode())

    def exit_code(self) -> int | None:
        """Return the exit code of the present run, negative for a signal; None while it runs."""
        code = self.process.exitcode  # asked first: a dead worker has sent nothing after that
        with suppress(EOFError, ConnectionError):
            if self.connection.poll():
                return int(json.loads(self.connection.recv_bytes()))
        return code

    @property
    def is_alive(self) -> bool:
        """True if it can take a run."""
        return self.process.exitcode is None

    def send_signal(self, number: int) -> None:
        """Send a signal to the process; OF_THE_GROUP also to the processes that it has started.

        Nothing is sent to a process that has been waited for, whose id may belong to another one.
        A stopped process continues at any other signal, so that it acts on it.
        """
        process = self.process
        if process.exitcode is None and process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)
                os.killpg(process.pid, number if number in OF_THE_GROUP else signal.SIGCONT)


def work(
    program: Callable[[], None],
    server: int,
    requests: Connection,
    inherited: Sequence[Connection],
) -> None:
    """Execute the requested runs in this process, a new child of the process `server`.

    A request is {"arguments", "errors", "environment", "memory", "keep"}.  The process ends with
    the exit code of a run unless that is 0 and the request says that the worker is kept.
    """
    for connection in inherited:
        connection.close()
    os.setsid()
    # Ray starts its processes with SIGINT blocked, and their children inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with(server, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # other runs have the other cores
    while True:
        request = json.loads(requests.recv_bytes())
        code = execute(program, request)
        if code or not request["keep"]:
            sys.exit(code)
        for number, handler in handlers.items():  # an idle worker ends at once
            signal.signal(number, handler)
        gc.unfreeze()
        gc.collect()
        requests.send_bytes(json.dumps(code).encode())


def execute(program: Callable[[], None], request: Mapping[str, Any]) -> int:
    """Execute one run and return its exit code; a bug raises."""
    with open(request["errors"], "w") as log:
        os.dup2(log.fileno(), 2)
    os.environ.update(request["environment"])
    if request["memory"] is not None:
        limit_memory(request["memory"])
    sys.argv = ["deepstack", *request["arguments"]]
    try:
        program()
    except SystemExit as end:
        if isinstance(end.code, str):  # as Python does at its end
            print(end.code, file=sys.stderr)
        sys.stderr.flush()
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def limit_memory(memory: int) -> None:
    """Limit this process to `memory` bytes; an allocation beyond them fails (Linux only).

    RLIMIT_DATA counts private writable mappings, from which Python and torch allocate; a limit of
    the address space would count the libraries' reservations too.  Resident pages shared with the
    server count as used.
    """
    import resource

    if sys.platform != "linux":
        return
    pages = Path("/proc/self/statm").read_text().split()
    resident, data = (int(pages[i]) * resource.getpagesize() for i in (1, 5))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = data + max(memory - resident, LEAST_BYTES)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
