"""Starts runs at once: a process that has imported everything forks one process for each run.

Importing torch takes longer than training a small network.  The fork server is a process with one
thread that only imports and forks, so a sweep pays for the imports once.  Each run is a process
that executes `deepstack train` with the usual arguments.

    ForkServer (in the sweep) -- lines of JSON --> serve() (in the server) -- fork --> a run

If the sweep dies, the server reads the end of its input and sends SIGTERM to the runs, which save
and end.  If the server dies, the kernel sends it.  The server kills a run that has not ended after
GRACE_SECONDS, so no process outlives the sweep for long.

The forkserver of `multiprocessing` does not fit.  It imports the user's script again, which fails
in a script without a main guard.  It sends pickles through a socket.  It keeps the environment of
the first sweep.  It does not kill runs that hang after SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NoReturn

from deepstack import config as conf

POLL_SECONDS = 0.05
# How long a run may take to save after its sweep has died.
GRACE_SECONDS = 60.0
# The least that any limit leaves, because libraries and their threads must start.
LEAST_BYTES = 64 * 2**20
PR_SET_PDEATHSIG = 1
# The imports of `deepstack train`, by name: the command line is a package above this one.
IMPORTED = ("deepstack.training", "deepstack.cli", "deepstack.cli.display", "deepstack.cli.signals")


class ForkServer:
    """Starts `deepstack <arguments>` in processes forked from one that has imported it already.

    `close` ends it and the remaining runs, which save.
    folder: temporary files of the runs, removed with the server.
    here: the working directory of the runs, if that folder exists; default the present one.
    """

    def __init__(self, here: str | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="deepstack-"))
        # As under `deepstack`, nothing is imported from the present folder.
        code = (
            "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[2]]; "
            "from deepstack.sweeps.fork_server import serve; serve(sys.argv[1])"
        )
        self._server = subprocess.Popen(
            [sys.executable, "-c", code, str(self.folder), str(Path(__file__).parents[2])],
            cwd=here if here is not None and os.path.isdir(here) else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A Ctrl-C on the terminal reaches only the sweep, which passes it on once.
            start_new_session=True,
        )
        assert self._server.stdin is not None and self._server.stdout is not None
        self._requests, self._output = self._server.stdin, self._server.stdout
        self._answers = LineReader(self._output.fileno())
        self._count = 0
        self._exit_codes: dict[int | None, int] = {}

    @property
    def is_alive(self) -> bool:
        """True if the server can start runs."""
        return self._server.poll() is None

    @property
    def is_ready(self) -> bool:
        """True if a run would begin at once: the imports are done, or there is no server left."""
        return not self.is_alive or self.exit_code(None) is not None

    def start(
        self,
        arguments: Sequence[str],
        errors: Path,
        environment: Mapping[str, str],
        *,
        memory: int | None = None,
    ) -> Process:
        """Start `deepstack <arguments>` with these environment variables added.

        Its stderr goes to the file `errors`.  memory: limit in bytes; an allocation beyond it
        raises an error inside the run.
        """
        process = Process(self, self._count, errors, arguments)
        self._count += 1
        self.send(
            arguments=list(arguments),
            errors=str(errors),
            environment=dict(environment),
            memory=memory,
        )
        return process

    def send(self, **request: Any) -> None:
        """Send a request to the server; `exit_code` reports a server that has died."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()

    def exit_code(self, number: int | None) -> int | None:
        """Return the exit code of a run, negative for a signal; None while it runs.

        number: None is the imports.
        """
        dead = not self.is_alive
        if not self._output.closed:
            self._exit_codes.update(self._answers.read())
        if dead and number not in self._exit_codes:
            # The kernel has sent SIGTERM to the runs; nobody collects their exit codes.
            return 128 + signal.SIGTERM
        return self._exit_codes.get(number)

    def close(self) -> None:
        """End the server and with it the remaining runs."""
        if self._output.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._server.wait()
        self._exit_codes.update(self._answers.read())
        self._output.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Process:
    """A run that a `ForkServer` started."""

    def __init__(
        self, server: ForkServer, number: int, errors: Path, arguments: Sequence[str]
    ) -> None:
        self._server, self._number, self._errors = server, number, errors
        self._arguments = arguments

    def poll(self) -> int | None:
        """Return the exit code, negative for the signal that ended it; None while it runs."""
        return self._server.exit_code(self._number)

    def stderr_text(self) -> str:
        """Return its stderr without positions in its config, a temporary file of the sweep."""
        try:
            text = self._errors.read_text(errors="replace")
        except FileNotFoundError:  # its process could not even be started
            return ""
        return re.sub(rf"{re.escape(self._arguments[1])}(:\d+)*: ", "", text)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended; never to another process of the same id."""
        self._server.send(signal=number, run=self._number)


class LineReader:
    """Reads lines of JSON from a pipe without blocking.

    is_open: False after the end of the input.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.is_open, self._rest = descriptor, True, b""
        os.set_blocking(descriptor, False)

    def read(self) -> list[Any]:
        """Return the values of all complete lines that have arrived."""
        values: list[Any] = []
        while self.is_open:
            try:
                data = os.read(self.descriptor, 65536)
            except BlockingIOError:
                break
            self.is_open = bool(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            values += map(json.loads, lines)
        return values


def serve(folder: str) -> NoReturn:
    """Fork a process for every request on stdin, and report the exit code of each run on stdout.

    A request is {"arguments", "errors", "environment", "memory"} or {"signal", "run"}.
    folder: removed at the end, because a killed sweep cannot remove it.
    """
    for module in IMPORTED:
        import_module(module)
    conf.parse_config("")  # builds the validators that the first configuration needs
    gc.collect()
    gc.freeze()  # shared with the runs, whose collector then never writes to these pages
    report(None, 0)
    requests = LineReader(0)
    runs: dict[int, ForkProcess] = {}
    count, deadline = 0, float("inf")
    while requests.is_open or runs:
        select.select([0] if requests.is_open else [], [], [], POLL_SECONDS)
        for request in requests.read():
            if "signal" in request:
                if request["run"] in runs:
                    send_signals([runs[request["run"]]], request["signal"])
            else:
                runs[count] = ForkProcess(target=run, args=(os.getpid(),), kwargs=request)
                runs[count].start()
                count += 1
        if not requests.is_open and deadline == float("inf"):
            send_signals(runs.values(), signal.SIGTERM)
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline:
            send_signals(runs.values(), signal.SIGKILL)
        for number, process in [*runs.items()]:
            if process.exitcode is not None:
                report(number, process.exitcode)
                del runs[number]
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def report(number: int | None, code: int) -> None:
    """Report the exit code of a run to the sweep; number None reports the end of the imports."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps([number, code]).encode() + b"\n")


def send_signals(processes: Iterable[ForkProcess], number: int) -> None:
    """Send a signal to children that have not been waited for: their ids cannot be reused.

    SIGKILL goes to their process groups too, which include the processes that a run started.
    """
    for process in processes:
        assert process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
        if number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)


def run(
    server: int,
    arguments: Sequence[str],
    errors: str,
    environment: Mapping[str, str],
    memory: int | None,
) -> None:
    """Execute `deepstack <arguments>` in this process, a new child of the process `server`."""
    os.setsid()
    if sys.platform == "linux":  # the kernel sends SIGTERM when the server dies
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != server:
            os.kill(os.getpid(), signal.SIGTERM)
    read, write = os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, path in enumerate((os.devnull, os.devnull, errors)):
        opened = os.open(path, write if number else read, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.update(environment)
    if memory is not None:
        limit_memory(memory)
    sys.argv = ["deepstack", *arguments]
    runpy.run_module("deepstack", run_name="__main__")


def limit_memory(memory: int) -> None:
    """Limit this process to `memory` bytes; an allocation beyond them fails (Linux only).

    RLIMIT_DATA counts private writable mappings, from which Python and torch allocate; a limit of
    the address space would count the libraries' reservations too.  Resident pages shared with the
    server count as used.
    """
    import resource

    if sys.platform != "linux":
        return
    used = {
        line.split(":")[0]: 1024 * int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(("VmData:", "VmRSS:"))
    }
    remaining = max(memory - used["VmRSS"], LEAST_BYTES)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used["VmData"] + remaining, hard))
