"""Supervises one run on a node of a Ray cluster.

A fork server starts the run, as in a local sweep.  When Ray ends the supervising process (the sweep
has died, a stop, lack of memory), the kernel sends SIGTERM to the run, which saves and ends.
"""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack.base import ResourceError, die_with
from deepstack.integrations.ray.folder_sync import FolderChanges, Source, write_changes
from deepstack.records import RunFolder, files
from deepstack.sweeps import ForkedProcess, ForkServer, train_arguments

POLL_SECONDS = 0.1
EXCHANGE_SECONDS = 1.0
# The lock of a lost node may stay for a while: it still saves, or the file server waits for it.
FREE_SECONDS = 60.0

_server: ForkServer | None = None


@dataclass(frozen=True)
class Order:
    """The order to train one run on a node.

    config: the file of the run, YAML.
    command: of a shell that runs the file; empty if deepstack trains it.
    folder, study, out: of the sweep.
    here: its working directory.
    token: a file in its folder.
    plugins: name and content of each.
    resources: its share of the node, as options of a Ray task.
    lost: how often its node was lost.
    """

    config: str
    folder: str
    study: str
    out: str
    here: str
    token: str
    plugins: list[tuple[str, bytes]] = field(default_factory=list)
    resources: dict[str, float] = field(default_factory=dict)
    lost: int = 0
    command: str = ""

    @property
    def key(self) -> str:
        """The name of this start of the run in the mailbox."""
        return f"{self.folder}.{self.lost}"


Exchange = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Sends a message to the sweep and returns the messages that it sent since the last exchange."""


def train_on_node(order: Order, mailbox: Any) -> tuple[int, str]:
    """Train a run as a task of Ray and return its exit code and stderr."""
    ray = import_module("ray")
    return work(order, lambda message: ray.get(mailbox.exchange.remote(order.key, message)))


def work(order: Order, exchange: Exchange) -> tuple[int, str]:
    """Train a run and return its exit code and stderr.

    The first message is {"shared": whether the node has the sweep's folder}; the sweep answers
    {"begin": the content of a folder that is not shared}.  Later messages are {"changes"}, empty if
    the folder is shared.  The sweep may send {"signal": number} at any time.
    """
    shared = is_shared(order)
    messages = exchange({"shared": shared})
    while not messages:
        time.sleep(POLL_SECONDS)
        messages = exchange({})
    if "signal" in messages[0]:  # before it began
        return 128 + int(messages[0]["signal"]), ""
    if order.command and not shared:
        text = f"deepstack: {order.out} is not on this node, and a command needs its folder"
        return ResourceError.exit_code, text
    server = None if order.command else fork_server(order.here)
    above = None if server is None else server.folder
    with tempfile.TemporaryDirectory(dir=above, ignore_cleanup_errors=True) as scratch:
        out = order.out if shared else scratch
        folder = RunFolder(Path(out) / order.study / order.folder)
        source = Source(folder)
        if not shared:
            write_changes(folder, FolderChanges(*messages[0]["begin"]))
            source.changes()  # the sweep has sent these; they need not go back
        elif order.lost:
            deadline = time.monotonic() + FREE_SECONDS
            while folder.holder() is not None and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        process: RunProcess
        if server is None:
            process = start_command(order, Path(scratch))
        else:
            process = start(server, order, out, Path(scratch))
        try:
            while True:
                for message in messages:
                    if "signal" in message:
                        process.send_signal(message["signal"])
                code = wait(process, EXCHANGE_SECONDS)
                messages = exchange({} if shared else {"changes": tuple(source.changes())})
                if code is not None:
                    return code, process.stderr_text()
        finally:
            process.send_signal(signal.SIGTERM)  # Ray ends this process, or the sweep has died
            wait(process)


def fork_server(here: str) -> ForkServer:
    """Return the fork server of this process of Ray, which trains several runs.

    here: relative paths in a configuration are the sweep's.
    """
    global _server
    if _server is None or not _server.is_alive:
        _server = ForkServer(here if os.path.isdir(here) else None)
    return _server


class CommandProcess:
    """A shell command that runs a file; it gets SIGTERM when this process ends.

    variables: to add to those of this process.
    """

    def __init__(self, command: str, file: Path, variables: dict[str, str]) -> None:
        self._errors, this = file.with_name("stderr"), os.getpid()
        with files.open_log(self._errors) as errors:
            self._process = subprocess.Popen(
                ["sh", "-c", f"exec {command}", file],
                env=os.environ | variables,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                preexec_fn=lambda: die_with(this, signal.SIGTERM),
            )

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        """Send a signal to it, unless it has ended."""
        self._process.send_signal(number)

    def stderr_text(self) -> str:
        """Return its stderr."""
        return self._errors.read_text(encoding="utf-8", errors="replace")


RunProcess = ForkedProcess | CommandProcess


def start_command(order: Order, scratch: Path) -> CommandProcess:
    """Start the command of a run with its GPU."""
    file = scratch / "run.yaml"
    files.replace(file, order.config.encode())
    hidden = {} if order.resources.get("num_gpus") else {"CUDA_VISIBLE_DEVICES": ""}
    return CommandProcess(order.command, file, hidden)


def start(server: ForkServer, order: Order, out: str, scratch: Path) -> ForkedProcess:
    """Start the run with its plugins, its GPU, and its share of the node's memory."""
    arguments = train_arguments(order.study, out)
    for name, content in order.plugins:
        plugin = scratch / name
        plugin.write_bytes(content)
        arguments += ["--plugin", str(plugin)]
    if order.resources.get("num_gpus"):
        gpu, memory = os.environ.get("CUDA_VISIBLE_DEVICES", ""), None
    else:  # other runs may use the rest of this node
        share = conf.machine_memory() * int(order.resources.get("num_cpus", 1)) // conf.cores()
        gpu, memory = "", max(int(order.resources.get("memory", 0)), share)
    return server.start(order.config, arguments, {"CUDA_VISIBLE_DEVICES": gpu}, memory=memory)


def wait(process: RunProcess, seconds: float = float("inf")) -> int | None:
    """Return the exit code of a process; None if it does not end within `seconds`."""
    deadline = time.monotonic() + seconds
    while (code := process.poll()) is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return code


def is_shared(order: Order) -> bool:
    """Return whether this node has the sweep's folder: the same file at a writable path."""
    token = Path(order.token)
    try:
        with tempfile.TemporaryFile(dir=token.parent):
            return token.exists()
    except OSError:
        return False
