"""A Ray cluster that the user has started: how the sweep gets to it, and what it sends there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from typing import Any

from deepstack import plugins
from deepstack.errors import ConfigError, PluginError, ResourceError

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 120.0


def task(version: str) -> Callable[..., tuple[int, str]]:
    """The function that Ray calls on a node: sent by value, so that it can say what is missing."""

    def run_deepstack(order: dict[str, Any], mailbox: Any, key: str) -> tuple[int, str]:
        from importlib import import_module, metadata

        ray = import_module("ray")
        try:
            found = metadata.version("deepstack")
            if found != version:
                raise ImportError(f"found {found}")
            node = import_module("deepstack.sweeps.ray_node")
        except ImportError as error:
            import socket
            import sys

            return 2, (
                f"{socket.gethostname()}: deepstack {version} is needed for {sys.executable}: "
                f"{error}"
            )

        def talk(news: dict[str, Any]) -> Any:
            return ray.get(mailbox.exchange.remote(key, news))

        result: tuple[int, str] = node.work(node.Order(**order), talk)
        return result

    return run_deepstack


def mailbox_class() -> type:
    """The actor between sweep and tasks, sent by value: it needs no deepstack and runs nothing."""

    class Mailbox:
        def __init__(self) -> None:
            self.heard: list[tuple[str, dict[str, Any]]] = []
            self.words: dict[str, list[dict[str, Any]]] = {}

        def exchange(self, key: str, news: dict[str, Any]) -> list[dict[str, Any]]:
            if news:
                self.heard.append((key, news))
            return self.words.pop(key, [])

        def say(self, key: str, word: dict[str, Any]) -> None:
            self.words.setdefault(key, []).append(word)

        def collect(self) -> list[tuple[str, dict[str, Any]]]:
            found, self.heard = self.heard, []
            return found

    return Mailbox


def connect(address: str | None) -> tuple[Any, bool]:
    """(the module ray, whether it was this that connected it).  Never starts a cluster.

    Raises ResourceError where Ray is not installed or no cluster answers.
    """
    try:
        ray = import_module("ray")
        import_module("ray.exceptions")
    except ImportError as error:
        raise ResourceError("--ray: Ray is not installed: pip install 'deepstack[ray]'") from error
    if ray.is_initialized():
        return ray, False
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    how = "start one with `ray start --head`, then --ray ADDRESS with what it prints"
    refuse_silent(where, how)
    mine = threading.current_thread() is threading.main_thread()
    # Ray puts a handler of its own in the place of the one that lets runs save and end.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=where, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        cause = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ResourceError(f"--ray: no Ray cluster at {where}: {cause}\n{how}") from error
    finally:
        for number, handler in before.items() if mine else ():
            signal.signal(number, handler)
    with contextlib.suppress(ImportError):
        # A node that is lost would be told in eighty lines, on stdout, whatever was asked above.
        vars(import_module("ray._private.worker"))["_worker_logs_enabled"] = False
    return ray, True


def refuse_silent(where: str, how: str) -> None:
    """Raise ResourceError when nothing listens at host:port: Ray itself would try for minutes."""
    host, _, port = where.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ResourceError(f"--ray: nothing answers at {where}: {error}\n{how}") from error


def ask_nodes(ray: Any, nodes: Sequence[dict[str, Any]]) -> int | None:
    """Bytes of the smallest GPU of the cluster, None where there is none or nobody can tell.

    Raises ConfigError, naming every node where this version of deepstack cannot be imported.
    """
    version = metadata.version("deepstack")

    def facts() -> tuple[str, str, str, list[int]]:
        import socket
        import subprocess
        import sys
        from importlib import metadata, util

        try:
            found = metadata.version("deepstack") if util.find_spec("deepstack") else "none"
        except ImportError:
            found = "none"
        try:
            words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
            said = subprocess.run(words, capture_output=True, text=True, timeout=30).stdout
            sizes = [int(line) * 2**20 for line in said.split()]
        except (OSError, ValueError, subprocess.TimeoutExpired):
            sizes = []
        return socket.gethostname(), sys.executable, found, sizes

    asked = [
        ray.remote(facts).options(num_cpus=0, scheduling_strategy=pinned(node["NodeID"])).remote()
        for node in nodes
    ]
    answers = []
    for answer in ray.wait(asked, num_returns=len(asked), timeout=ANSWER_SECONDS)[0]:
        with contextlib.suppress(ray.exceptions.RayError):  # a node that has just been lost
            answers.append(ray.get(answer))
    if wrong := [answer for answer in answers if answer[2] != version]:
        lines = [f"  {host}: {python} has {found}" for host, python, found, _ in wrong]
        raise ConfigError(
            f"--ray: every node needs deepstack {version}: install it there\n" + "\n".join(lines)
        )
    return min((size for answer in answers for size in answer[3]), default=None)


def pinned(node: str) -> Any:
    """The scheduling strategy for one node and no other."""
    strategies = import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def plugin_files() -> list[tuple[str, str, bytes]]:
    """Name, sha256 and content of the plugins loaded here.

    Raises PluginError when one is no longer the file that was loaded.
    """
    found = []
    for path in plugins.PATHS:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise PluginError(f"--plugin {path}: {error.strerror}") from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != plugins.LOADED[path.name]:
            raise PluginError(f"--plugin {path} has changed since it was loaded")
        found.append((path.name, digest, content))
    return found
