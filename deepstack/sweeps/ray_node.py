"""A run on a node of a Ray cluster: what surrounds `deepstack train` there.  Knows nothing of Ray.

The run is started as in a local sweep, by a starter: when Ray ends the process that looks after it
(the sweep is gone, a stop, lack of memory), the run hears of it, saves and ends.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
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
from deepstack.sweeps.folder_sync import FolderChanges, Source, Target
from deepstack.sweeps.fork_server import ForkServer, Process
from deepstack.sweeps.launcher import train_arguments
from deepstack.training import cores

LOOK_SECONDS = 0.1
TALK_SECONDS = 1.0
TOKEN_SECONDS = 2.0  # a network file system may show a new file a little later
FREE_SECONDS = 60.0
SCRATCH = "deepstack-ray-"

_server: ForkServer | None = None


@dataclass(frozen=True)
class Order:
    """A run to be made.

    config: YAML; folder: its name in the sweep's study; alone: where no other run is; study, out:
    as for the sweep; here: its working directory; token: a file there and what stands in it;
    plugins: name, sha256 and content of each; cores, memory in bytes, gpu: what Ray has given it;
    before: how often it was lost already.
    """

    config: str
    folder: str
    alone: str
    study: str
    out: str
    here: str
    token: tuple[str, str]
    plugins: list[tuple[str, str, bytes]] = field(default_factory=list)
    cores: int = 1
    memory: int = 0
    gpu: bool = False
    before: int = 0


Talk = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""Tells the sweep what is new and returns what it asks for since the last time."""


def work(order: Order, talk: Talk) -> tuple[int, str]:
    """Make a run; its exit code and what it wrote to stderr.

    talk says {"shared", "node"} first; the sweep answers {"begin": what is there, or None}.  Then
    it says {"news"} from time to time where the folder is not shared, and hears {"signal": number}.
    """
    shared = sees(order)
    asked = talk({"shared": shared, "node": socket.gethostname()})
    while not any("begin" in word for word in asked):
        if number := next((word["signal"] for word in asked if "signal" in word), 0):
            return 128 + number, ""
        time.sleep(LOOK_SECONDS)
        asked += talk({})
    there: dict[str, Any] | None = next(word["begin"] for word in asked if "begin" in word)
    with scratch() as beside:
        out = Path(order.out) if shared else beside / "results"
        folder = RunFolder(out / order.study / (order.folder if shared else order.alone))
        source = None
        if not shared:
            if there is not None:
                Target(folder).write(FolderChanges(**there))
            source = Source(folder)
            source.news()  # the sweep has sent it: it need not be sent back
        elif order.before:
            wait_until_free(folder)
        words = words_for(order, beside, out)
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "") if order.gpu else ""
        process = start(order, words, beside / "stderr.txt", {"CUDA_VISIBLE_DEVICES": seen})
        try:
            return look_after(process, source, talk), process.stderr_text()
        finally:
            if process.poll() is None:  # Ray ends this, or the sweep has gone
                process.send_signal(signal.SIGTERM)
                while process.poll() is None:
                    time.sleep(LOOK_SECONDS)


def look_after(process: Process, source: Source | None, talk: Talk) -> int:
    """Hand news on to the sweep and its signals to the run, until that has ended."""
    said = 0.0
    while True:
        code = process.poll()
        if code is not None or time.monotonic() - said > TALK_SECONDS:
            said = time.monotonic()
            for word in talk({} if source is None else {"news": vars(source.news())}):
                if "signal" in word:
                    process.send_signal(word["signal"])
        if code is not None:
            return code
        time.sleep(LOOK_SECONDS)


def sees(order: Order) -> bool:
    """Whether this node has the sweep's folder: the same token under the same path, writable."""
    path, wanted = Path(order.token[0]), order.token[1]
    deadline = time.monotonic() + TOKEN_SECONDS
    while True:
        try:
            found = path.read_text() == wanted
            break
        except OSError:
            if time.monotonic() > deadline or not Path(order.out).is_dir():
                return False
            time.sleep(LOOK_SECONDS)
    if found:
        try:
            with tempfile.TemporaryFile(dir=path.parent):
                return True
        except OSError:
            pass
    return False


def wait_until_free(folder: RunFolder) -> None:
    """A run that was lost may still be saving, where only the word of it was lost."""
    deadline = time.monotonic() + FREE_SECONDS
    while folder.holder() is not None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)


def words_for(order: Order, beside: Path, out: Path) -> list[str]:
    """The arguments of `deepstack` here; writes the configuration and the plugins it needs.

    Raises PluginError when a plugin is not the file that was sent.
    """
    config = beside / "run.yaml"
    config.write_text(order.config, encoding="utf-8")
    words = train_arguments(config, out=out, study=order.study)
    for name, digest, content in order.plugins:
        if hashlib.sha256(content).hexdigest() != digest:
            raise PluginError(f"the plugin {name} did not arrive as it was sent (sha256 differs)")
        path = beside / "plugins" / Path(name).name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        words += ["--plugin", str(path)]
    return words


def start(order: Order, words: list[str], errors: Path, seen: dict[str, str]) -> Process:
    """Start the run from the starter of this process, which has imported everything once."""
    global _server
    if _server is None or not _server.is_alive:
        # Relative paths in a configuration are those of the sweep.
        _server = ForkServer(order.here)
    # Other runs may have all the rest of this node.
    share = conf.machine_memory() * order.cores // cores()
    memory = None if order.gpu else max(order.memory, share)
    return _server.start(words, errors, seen, memory=memory)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder of this task, held by a lock; those of tasks that were killed are removed."""
    for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        with suppress(OSError):
            busy = [RunFolder(left), *map(RunFolder, left.glob("results/*/*"))]
            old = time.time() - left.stat().st_mtime > FREE_SECONDS
            if old and all(folder.holder() is None for folder in busy):
                shutil.rmtree(left, ignore_errors=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=SCRATCH)))
        stack.enter_context(RunFolder(folder).lock())
        yield folder
