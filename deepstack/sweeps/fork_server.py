"""Starts runs at once: a process that has imported everything forks the workers that train them.

Importing torch takes longer than training a small network.  The fork server is a process with one
thread that only imports and forks, so a sweep pays for the imports once.  A worker executes
`deepstack train` with the usual arguments: once, or for one run after the other (`keep`).

    ForkServer (in the sweep) <-- messages of JSON --> serve() (in the server) -- fork --> Worker

The server ends with the connection, that is, also when the sweep dies: it sends SIGTERM to the
runs, which save and end, and kills those that have not ended after GRACE_SECONDS.  If the server
dies, the kernel sends SIGTERM to the runs.

The forkserver of `multiprocessing` does not fit.  It imports the user's script again, which fails
in a script without a main guard. It keeps the environment of the first sweep, and the runs of a
sweep that has died do not end.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any, NoReturn

from deepstack import config as conf
from deepstack.base import torchrun
from deepstack.records import trouble
from deepstack.sweeps.worker import Worker

POLL_SECONDS = 0.05
# How long a run may take to save after its sweep has died.
GRACE_SECONDS = 60.0
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
        keep: bool = False,
    ) -> ForkedProcess:
        """Start `deepstack train` of a configuration, YAML, with these variables added.

        memory: limit in bytes; an allocation beyond it raises an error inside the run.
        keep: whether the run may take the worker of an earlier one with the same variables, and
            leaves it to a later one.

        Raises ResourceError if there is no space for temporary files.
        """
        self._started += 1
        file = self.folder / f"{self._started:06d}.yaml"
        process = ForkedProcess(self, self._started, file, keep)
        with trouble(process.config):
            process.config.write_text(config, encoding="utf-8")
            process.errors.touch()
        self.send(
            arguments=["train", str(process.config), *arguments],
            errors=str(process.errors),
            environment=dict(environment or {}),
            memory=memory,
            keep=keep,
        )
        return process

    def end_idle_workers(self, count: int) -> None:
        """End the longest idle workers, which still hold memory."""
        self.send(end=count)

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
    """A run that a `ForkServer` started.

    config: its configuration, a temporary file.
    keep: whether its worker is kept.
    """

    server: ForkServer
    number: int
    config: Path
    keep: bool = False

    @property
    def errors(self) -> Path:
        """The file with its stderr."""
        return self.config.with_suffix(".err")

    def poll(self) -> int | None:
        """Return the exit code, negative for the signal that ended it; None while it runs."""
        return self.server.exit_code(self.number)

    @property
    def leaves_worker(self) -> bool:
        """True if it has ended and its worker waits for another run."""
        return self.keep and self.poll() == 0

    def stderr_text(self) -> str:
        """Return its stderr without positions in its temporary configuration."""
        text = self.errors.read_text(errors="replace")
        return re.sub(rf"{re.escape(str(self.config))}(:\d+)*: ", "", text)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended; never to another process of the same id."""
        self.server.send(number=self.number, signal=number)


def serve(program: Callable[[], None], folder: str) -> NoReturn:
    """Give every request on stdin, a connection, to a worker, and answer with the exit codes.

    A request is {"arguments", "errors", "environment", "memory", "keep"}, {"number", "signal"} or
    {"end": count of idle workers}; runs are numbered from 1.

    program: each worker calls it with the arguments in sys.argv.
    folder: removed at the end.
    """
    conf.parse_config("")  # builds the validators that the first configuration needs
    gc.collect()
    gc.freeze()  # shared with the workers, whose collector then never writes to these pages
    sweep, started = Connection(0), 0
    runs: dict[int, Worker] = {}
    idle: list[Worker] = []
    with suppress(EOFError, ConnectionError):  # the end of the sweep
        while True:
            if sweep.poll(POLL_SECONDS):
                request = json.loads(sweep.recv_bytes())
                if "arguments" in request:
                    started += 1
                    runs[started] = idle_worker(idle, request) or Worker(
                        program, [one.connection for one in (*runs.values(), *idle)]
                    )
                    runs[started].assign(request)
                elif "end" in request:
                    end(idle[: request["end"]])
                    del idle[: request["end"]]
                elif request["number"] in runs:
                    runs[request["number"]].send_signal(request["signal"])
            for number, worker in [*runs.items()]:
                if (code := worker.exit_code()) is not None:
                    del runs[number]
                    if worker.is_alive:
                        idle.append(worker)
                    sweep.send_bytes(json.dumps([number, code]).encode())
    end([*runs.values(), *idle])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def idle_worker(idle: list[Worker], request: Mapping[str, Any]) -> Worker | None:
    """Take an idle worker for a request that keeps its worker, with the same environment."""
    for worker in idle if request["keep"] else ():
        if worker.environment == request["environment"] and worker.is_alive:
            idle.remove(worker)
            return worker
    return None


def end(workers: Sequence[Worker]) -> None:
    """Ask runs to save and end, and kill those that do not within GRACE_SECONDS."""
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.send_signal(signal.SIGKILL)
        worker.process.join()
