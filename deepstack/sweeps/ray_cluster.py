"""The connection to a Ray cluster that the user has started, and the code that it receives."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import deepstack
from deepstack import plugins
from deepstack.errors import ConfigError, PluginError, ResourceError

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 120.0


def task(version: str) -> Callable[..., tuple[int, str]]:
    """Return the function that Ray calls on a node; sent by value to report a missing deepstack."""

    def run_deepstack(order: dict[str, Any], mailbox: Any, key: str) -> tuple[int, str]:
        import socket
        import sys
        from importlib import import_module

        ray = import_module("ray")
        try:
            installed = import_module("deepstack").__version__
            if installed != version:
                raise ImportError(f"found {installed}")
            node = import_module("deepstack.sweeps.ray_node")
        except ImportError as error:
            where = f"{socket.gethostname()}: deepstack {version} is needed for {sys.executable}"
            return 2, f"{where}: {error}"

        def exchange(message: dict[str, Any]) -> Any:
            return ray.get(mailbox.exchange.remote(key, message))

        result: tuple[int, str] = node.work(node.Order(**order), exchange)
        return result

    return run_deepstack


def mailbox_class() -> type:
    """Return the class of the actor between sweep and tasks; sent by value, without deepstack."""

    class Mailbox:
        def __init__(self) -> None:
            self.for_sweep: list[tuple[str, dict[str, Any]]] = []
            self.for_tasks: dict[str, list[dict[str, Any]]] = {}

        def exchange(self, key: str, message: dict[str, Any]) -> list[dict[str, Any]]:
            if message:
                self.for_sweep.append((key, message))
            return self.for_tasks.pop(key, [])

        def send(self, key: str, message: dict[str, Any]) -> None:
            self.for_tasks.setdefault(key, []).append(message)

        def collect(self) -> list[tuple[str, dict[str, Any]]]:
            messages, self.for_sweep = self.for_sweep, []
            return messages

    return Mailbox


def connect(address: str | None) -> tuple[Any, bool]:
    """Connect to a cluster, never start one; return the module ray and whether it was unconnected.

    Raises ResourceError where Ray is not installed or no cluster answers.
    """
    try:
        ray = import_module("ray")
        import_module("ray.exceptions")
    except ImportError as error:
        raise ResourceError(
            "--ray: Ray is not installed: pip install '.[ray]' in deepstack's folder"
        ) from error
    if ray.is_initialized():
        return ray, False
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    how = "start one with `ray start --head`, then --ray ADDRESS with what it prints"
    refuse_silent(where, how)
    in_main_thread = threading.current_thread() is threading.main_thread()
    # Ray replaces the handlers that let runs save and end.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=where, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        cause = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ResourceError(f"--ray: no Ray cluster at {where}: {cause}\n{how}") from error
    finally:
        for number, handler in handlers.items() if in_main_thread else ():
            signal.signal(number, handler)
    with contextlib.suppress(ImportError):
        # Despite log_to_driver=False, Ray prints eighty lines about a lost node on stdout.
        vars(import_module("ray._private.worker"))["_worker_logs_enabled"] = False
    return ray, True


def refuse_silent(where: str, how: str) -> None:
    """Raise ResourceError if nothing listens at host:port; Ray itself would try for minutes."""
    host, _, port = where.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ResourceError(f"--ray: nothing answers at {where}: {error}\n{how}") from error


def check_nodes(ray: Any, nodes: Sequence[dict[str, Any]]) -> int | None:
    """Return the bytes of the cluster's smallest GPU, None if there is none or it is unknown.

    Raises ConfigError with the nodes where this version of deepstack cannot be imported.
    """
    version = deepstack.__version__

    def facts() -> tuple[str, str, str, list[int]]:
        import socket
        import subprocess
        import sys
        from importlib import import_module

        try:
            installed = import_module("deepstack").__version__
        except ImportError:
            installed = "none"
        try:
            query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
            answer = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout
            sizes = [int(line) * 2**20 for line in answer.split()]
        except (OSError, ValueError, subprocess.TimeoutExpired):
            sizes = []
        return socket.gethostname(), sys.executable, installed, sizes

    queries = [
        ray.remote(facts).options(num_cpus=0, scheduling_strategy=pinned(node["NodeID"])).remote()
        for node in nodes
    ]
    answers = []
    for answer in ray.wait(queries, num_returns=len(queries), timeout=ANSWER_SECONDS)[0]:
        with contextlib.suppress(ray.exceptions.RayError):  # a node that was just lost
            answers.append(ray.get(answer))
    if wrong := [answer for answer in answers if answer[2] != version]:
        lines = [f"  {host}: {python} has {other}" for host, python, other, _ in wrong]
        raise ConfigError(
            f"--ray: every node needs deepstack {version}: install it there\n" + "\n".join(lines)
        )
    return min((size for answer in answers for size in answer[3]), default=None)


def pinned(node: str) -> Any:
    """Return the scheduling strategy for one node and no other."""
    strategies = import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def plugin_files() -> list[tuple[str, str, bytes]]:
    """Return name, sha256 and content of the loaded plugins.

    Raises PluginError for a file that has changed since it was loaded.
    """
    loaded = []
    for path, recorded in plugins.LOADED.values():
        try:
            content = path.read_bytes()
        except OSError as error:
            raise PluginError(f"--plugin {path}: {error.strerror}") from error
        digest = hashlib.sha256(content).hexdigest()
        if digest != recorded:
            raise PluginError(f"--plugin {path} has changed since it was loaded")
        loaded.append((path.name, digest, content))
    return loaded
