"""Supervises one run on a node of a Ray cluster.  Imports nothing of Ray.

A fork server starts the run, as in a local sweep.  When Ray ends the supervising process (the sweep
has died, a stop, lack of memory), the kernel sends SIGTERM to the run, which saves and ends.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepstack import config as conf
from deepstack.errors import PluginError
from deepstack.records import RunFolder
from deepstack.sweeps.folder_sync import FolderChanges, Source, write_changes
from deepstack.sweeps.fork_server import ForkServer
from deepstack.sweeps.launcher import train_arguments
from deepstack.training import cores

POLL_SECONDS = 0.1
EXCHANGE_SECONDS = 1.0
TOKEN_SECONDS = 2.0  # a network file system may show a new file a little later
FREE_SECONDS = 60.0
SCRATCH = "deepstack-ray-"

_server: ForkServer | None = None


@dataclass(frozen=True)
class Order:
    """The order to train one run on a node.

    config: YAML.  folder: its name in the sweep's study.  name: its name in a folder that is not
    shared.  study, out: as for the sweep.  here: its working directory.
    token: a file of the sweep and its content.  plugins: name, sha256 and content of each.
    resources: its share of the node, as options of a Ray task.  lost: how often its node was lost.
    """

    config: str
    folder: str
    name: str
    study: str
    out: str
    here: str
    token: tuple[str, str]
    plugins: list[tuple[str, str, bytes]] = field(default_factory=list)
    resources: dict[str, float] = field(default_factory=dict)
    lost: int = 0


Exchange = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Sends a message to the sweep and returns the messages that it sent since the last exchange."""


def work(order: Order, exchange: Exchange) -> tuple[int, str]:
    """Train a run and return its exit code and stderr.

    The first message is {"shared"}; the sweep answers {"begin": content of its folder, or None}.
    Later messages are {"changes"}, if the folder is not shared.  The sweep may send
    {"signal": number}.
    """
    shared = is_shared(order)
    messages = exchange({"shared": shared})
    while not any("begin" in message for message in messages):
        if number := next((m["signal"] for m in messages if "signal" in m), 0):
            return 128 + number, ""
        time.sleep(POLL_SECONDS)
        messages += exchange({})
    content: dict[str, Any] | None = next(m["begin"] for m in messages if "begin" in m)
    with scratch_folder() as scratch:
        out = Path(order.out) if shared else scratch / "results"
        folder = RunFolder(out / order.study / (order.folder if shared else order.name))
        source = None
        if not shared:
            if content is not None:
                write_changes(folder, FolderChanges(**content))
            source = Source(folder)
            source.changes()  # the sweep has sent these; they need not go back
        elif order.lost:  # it may still be saving, if only its connection was lost
            deadline = time.monotonic() + FREE_SECONDS
            while folder.holder() is not None and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        return supervise(order, arguments_of(order, scratch, out), source, exchange)


def supervise(
    order: Order, arguments: list[str], source: Source | None, exchange: Exchange
) -> tuple[int, str]:
    """Start the run; send changes to the sweep and its signals to the run until the run ends."""
    global _server  # lives as long as this process of Ray, which trains several runs
    if _server is None or not _server.is_alive:
        # Relative paths in a configuration are the sweep's.
        _server = ForkServer(order.here if os.path.isdir(order.here) else None)
    gpu = order.resources.get("num_gpus")
    # Other runs may use the rest of this node.
    share = conf.machine_memory() * int(order.resources.get("num_cpus", 1)) // cores()
    process = _server.start(
        order.config,
        arguments,
        {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "") if gpu else ""},
        memory=None if gpu else max(int(order.resources.get("memory", 0)), share),
    )
    exchanged = 0.0
    try:
        while True:
            code = process.poll()
            if code is not None or time.monotonic() - exchanged > EXCHANGE_SECONDS:
                exchanged = time.monotonic()
                changes = {} if source is None else {"changes": vars(source.changes())}
                for message in exchange(changes):
                    if "signal" in message:
                        process.send_signal(message["signal"])
            if code is not None:
                return code, process.stderr_text()
            time.sleep(POLL_SECONDS)
    finally:
        process.send_signal(signal.SIGTERM)  # Ray ends this process, or the sweep has died
        while process.poll() is None:
            time.sleep(POLL_SECONDS)


def is_shared(order: Order) -> bool:
    """Return whether this node has the sweep's folder: the same token at a writable path."""
    path, content = Path(order.token[0]), order.token[1]
    deadline = time.monotonic() + TOKEN_SECONDS
    while not os.path.exists(path):
        if time.monotonic() > deadline or not os.path.isdir(order.out):
            return False
        time.sleep(POLL_SECONDS)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return path.read_text() == content
    except OSError:
        return False


def arguments_of(order: Order, scratch: Path, out: Path) -> list[str]:
    """Write the plugins to `scratch` and return the arguments of a run.

    Raises PluginError for a plugin that differs from the file that was sent.
    """
    arguments = train_arguments(order.study, out)
    for name, digest, content in order.plugins:
        if hashlib.sha256(content).hexdigest() != digest:
            raise PluginError(f"the plugin {name} did not arrive as it was sent (sha256 differs)")
        path = scratch / "plugins" / Path(name).name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        arguments += ["--plugin", str(path)]
    return arguments


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a temporary folder under a lock, and remove those that killed tasks left."""
    for leftover in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        with suppress(OSError):
            busy = [RunFolder(leftover), *map(RunFolder, leftover.glob("results/*/*"))]
            old = time.time() - leftover.stat().st_mtime > FREE_SECONDS
            if old and all(folder.holder() is None for folder in busy):
                shutil.rmtree(leftover, ignore_errors=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=SCRATCH)))
        stack.enter_context(RunFolder(folder).lock())
        yield folder
