"""Starts runs at once: a process that has imported everything forks one process for each run.

Importing torch takes longer than training a small network.  The fork server is a process with one
thread that only imports and forks, so a sweep pays for the imports once.  Each run is a process
that executes `deepstack train` with the usual arguments.

    ForkServer (in the sweep) <-- messages of JSON --> serve() (in the server) -- fork --> a run

The server ends with the connection, that is, also when the sweep dies: it sends SIGTERM to the
runs, which save and end, and kills those that have not ended after GRACE_SECONDS.  If the server
dies, the kernel sends SIGTERM to the runs.

The forkserver of `multiprocessing` does not fit.  It imports the user's script again, which fails
in a script without a main guard. It keeps the environment of the first sweep, and the runs of a
sweep that has died do not end.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NoReturn

from deepstack import config as conf
from deepstack.base import torchrun
from deepstack.records import trouble

POLL_SECONDS = 0.05
# How long a run may take to save after its sweep has died.
GRACE_SECONDS = 60.0
# The least that any limit leaves, because libraries and their threads must start.
LEAST_BYTES = 64 * 2**20
PR_SET_PDEATHSIG = 1
OF_THE_GROUP = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)
"""Signals that go to the processes that a run has started, such as a compiler, too."""
# The exit code of a run whose server has died: the kernel has sent SIGTERM, nobody has the code.
SERVER_DIED = 128 + signal.SIGTERM
# As under `deepstack`, nothing is imported from the present folder (-P).
CODE = (
    "import sys; sys.path.append(sys.argv[2]); from deepstack.__main__ import main; "
    "from deepstack.sweeps.fork_server import serve; serve(main, sys.argv[1])"
)


class ForkServer:
    """Starts `deepstack train` in processes forked from one that has imported it already.

    `close` ends it and the remaining runs, which save.

    folder: for temporary files of the runs; removed with the server.
    cwd: the working directory of the runs, by default the present one.
    """

    def __init__(self, cwd: str | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="deepstack-"))
        self._connection, other_end = Pipe()
        with other_end:
            self._server = subprocess.Popen(
                [sys.executable, "-P", "-c", CODE, self.folder, Path(__file__).parents[2]],
                cwd=cwd,
                env=torchrun.without_launch(),  # each run trains alone, whatever started the sweep
                stdin=other_end.fileno(),
                stdout=subprocess.DEVNULL,
                # A Ctrl-C on the terminal reaches only the sweep, which passes it on once.
                start_new_session=True,
            )
        self._started = 0
        self._exit_codes: dict[int, int] = {}

    @property
    def is_alive(self) -> bool:
        """True if the server can start runs."""
        return self._server.poll() is None

    def start(
        self,
        config: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        *,
        memory: int | None = None,
    ) -> ForkedProcess:
        """Start `deepstack train` of a configuration, YAML, with these variables added.

        memory: limit in bytes; an allocation beyond it raises an error inside the run.

        Raises ResourceError if there is no space for temporary files.
        """
        self._started += 1
        process = ForkedProcess(self, self._started, self.folder / f"{self._started:06d}.yaml")
        with trouble(process.config):
            process.config.write_text(config, encoding="utf-8")
            process.errors.touch()
        self.send(
            arguments=["train", str(process.config), *arguments],
            errors=str(process.errors),
            environment=dict(environment or {}),
            memory=memory,
        )
        return process

    def send(self, **request: Any) -> None:
        """Send a request to the server; `exit_code` reports a server that has died."""
        with suppress(ConnectionError):
            self._connection.send_bytes(json.dumps(request).encode())

    def exit_code(self, number: int) -> int | None:
        """Return the exit code of a run, negative for a signal; None while it runs."""
        is_alive = self.is_alive  # asked first: a dead server sends nothing after the answers below
        with suppress(EOFError, OSError):
            while self._connection.poll():
                ended, code = json.loads(self._connection.recv_bytes())
                self._exit_codes[ended] = code
        return self._exit_codes.get(number, None if is_alive else SERVER_DIED)

    def close(self) -> None:
        """End the server and with it the remaining runs."""
        self._connection.close()
        self._server.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # of a server that was killed


@dataclass(eq=False)
class ForkedProcess:
    """A run that a `ForkServer` started.  config: its configuration, a temporary file."""

    server: ForkServer
    number: int
    config: Path

    @property
    def errors(self) -> Path:
        """The file with its stderr."""
        return self.config.with_suffix(".err")

    def poll(self) -> int | None:
        """Return the exit code, negative for the signal that ended it; None while it runs."""
        return self.server.exit_code(self.number)

    def stderr_text(self) -> str:
        """Return its stderr without positions in its temporary configuration."""
        text = self.errors.read_text(errors="replace")
        return re.sub(rf"{re.escape(str(self.config))}(:\d+)*: ", "", text)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended; never to another process of the same id."""
        self.server.send(number=self.number, signal=number)


def serve(program: Callable[[], None], folder: str) -> NoReturn:
    """Fork a process for every request on stdin, a connection, and answer with the exit codes.

    A request is {"arguments", "errors", "environment", "memory"} or {"number", "signal"}; runs are
    numbered from 1.

    program: each child calls it with the arguments in sys.argv.
    folder: removed at the end.
    """
    conf.parse_config("")  # builds the validators that the first configuration needs
    gc.collect()
    gc.freeze()  # shared with the runs, whose collector then never writes to these pages
    sweep, started = Connection(0), 0
    runs: dict[int, ForkProcess] = {}
    with suppress(EOFError, ConnectionError):  # the end of the sweep
        while True:
            if sweep.poll(POLL_SECONDS):
                request = json.loads(sweep.recv_bytes())
                if "signal" not in request:
                    started += 1
                    runs[started] = ForkProcess(
                        target=run, args=(program, os.getpid()), kwargs=request
                    )
                    runs[started].start()
                elif request["number"] in runs:
                    send_signal(runs[request["number"]], request["signal"])
            for number, process in [*runs.items()]:
                if process.exitcode is not None:
                    del runs[number]
                    sweep.send_bytes(json.dumps([number, process.exitcode]).encode())
    end(list(runs.values()))
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def end(processes: Sequence[ForkProcess]) -> None:
    """Ask the runs to save and end, and kill those that do not within GRACE_SECONDS."""
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        send_signal(process, signal.SIGTERM)
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        send_signal(process, signal.SIGKILL)
        process.join()


def send_signal(process: ForkProcess, number: int) -> None:
    """Send a signal to a child; OF_THE_GROUP also to the processes that it has started.

    Nothing is sent to a child that has been waited for, whose id may belong to another process.
    A stopped child continues at any other signal, so that it acts on it.
    """
    if process.exitcode is None and process.pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
            if number in OF_THE_GROUP:
                os.killpg(process.pid, number)
            else:
                os.killpg(process.pid, signal.SIGCONT)


def run(
    program: Callable[[], None],
    server: int,
    arguments: Sequence[str],
    errors: str,
    environment: Mapping[str, str],
    memory: int | None,
) -> None:
    """Execute `deepstack <arguments>` in this process, a new child of the process `server`."""
    os.setsid()
    # Ray starts its processes with SIGINT blocked, and their children inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux":  # the kernel sends SIGTERM when the server dies
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != server:
            os.kill(os.getpid(), signal.SIGTERM)
    with open(os.devnull) as nothing, open(errors, "w") as log:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 2)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # other runs have the other cores
    os.environ.update(environment)
    if memory is not None:
        limit_memory(memory)
    sys.argv = ["deepstack", *arguments]
    program()


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
