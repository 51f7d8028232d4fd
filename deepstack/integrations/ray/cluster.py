"""The connection to a Ray cluster that the user has started, and the code that it receives."""

import os
import signal
import socket
from contextlib import suppress
from importlib import import_module
from typing import Any

import deepstack
from deepstack.base import ConfigError, PluginError, ResourceError, plugins
from deepstack.records import trouble

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 120.0
ADVICE = "start one with `ray start --head`, then --ray ADDRESS with what it prints"


def mailbox_class() -> type:
    """Return the class of the actor between sweep and tasks; sent by value, without deepstack.

    key: of a task.
    """

    class Mailbox:
        def __init__(self) -> None:
            self.for_sweep: dict[str, list[dict[str, Any]]] = {}
            self.for_tasks: dict[str, list[dict[str, Any]]] = {}

        def exchange(self, key: str, message: dict[str, Any]) -> list[dict[str, Any]]:
            if message:
                self.for_sweep.setdefault(key, []).append(message)
            return self.for_tasks.pop(key, [])

        def send(self, key: str, message: dict[str, Any]) -> None:
            self.for_tasks.setdefault(key, []).append(message)

        def receive(self, key: str) -> list[dict[str, Any]]:
            return self.for_sweep.pop(key, [])

    return Mailbox


def connect(address: str | None) -> Any:
    """Connect to a cluster, never start one, and return the module ray.

    Raises ResourceError where Ray is not installed or no cluster answers.
    """
    try:
        ray = import_module("ray")
        import_module("ray.exceptions")
    except ImportError as error:
        raise ResourceError(
            "--ray: Ray is not installed: pip install '.[ray]' in deepstack's folder"
        ) from error
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    refuse_silent(where)
    # Ray replaces the handlers that let runs save and end.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(address=where, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        cause = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ResourceError(f"--ray: no Ray cluster at {where}: {cause}\n{ADVICE}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    with suppress(ImportError):
        # Despite log_to_driver=False, Ray prints eighty lines about a lost node on stdout.
        vars(import_module("ray._private.worker"))["_worker_logs_enabled"] = False
    return ray


def refuse_silent(where: str) -> None:
    """Raise ResourceError if nothing listens at host:port; Ray itself would try for minutes."""
    host, _, port = where.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ResourceError(f"--ray: nothing answers at {where}: {error}\n{ADVICE}") from error


def check_nodes(ray: Any) -> int | None:
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
        for node in ray.nodes()
        if node["Alive"]
    ]
    answers = []
    for answer in ray.wait(queries, num_returns=len(queries), timeout=ANSWER_SECONDS)[0]:
        with suppress(ray.exceptions.RayError):  # a node that was just lost
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


def plugin_files() -> list[tuple[str, bytes]]:
    """Return name and content of the loaded plugins.

    Raises PluginError for a file that has changed since it was loaded.
    """
    loaded = []
    for plugin in plugins.LOADED.values():
        with trouble(plugin.path):
            content = plugin.path.read_bytes()
        if content != plugin.content:
            raise PluginError(f"--plugin {plugin.path} has changed since it was loaded")
        loaded.append((plugin.path.name, content))
    return loaded
