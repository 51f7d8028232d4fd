"""Runs on the nodes of a Ray cluster that the user has started: one task a run.

    OnRay (in the sweep) -- orders --> Mailbox (an actor beside it) <-- messages -- work() (node)

If a node is lost, the sweep itself submits the task again, not Ray: the checkpoints that the node
had sent back go along, and the run resumes from them.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Self

import deepstack
from deepstack.errors import DeepstackError, ResourceError
from deepstack.records import RunFolder, files
from deepstack.sweeps.folder_sync import FolderChanges, Source, write_changes
from deepstack.sweeps.launcher import Launcher
from deepstack.sweeps.plan import Cell
from deepstack.sweeps.ray_cluster import (
    ANSWER_SECONDS,
    check_nodes,
    connect,
    mailbox_class,
    pinned,
    plugin_files,
    task,
)
from deepstack.sweeps.ray_node import Order
from deepstack.sweeps.resources import config_yaml, requirements_of
from deepstack.training import run_name

COLLECT_SECONDS = 0.3
NODES_SECONDS = 2.0
LOST_AT_MOST = 5  # a run that crashes its node each time must not crash all nodes
PER_GPU_AT_MOST = 8
TOKEN = ".ray-"
# The names of resources: as options of a task, and of a node.
RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}


class OnRay(Launcher):
    """One task a run on the cluster at `address` (default: RAY_ADDRESS, or the one of this host).

    workers: runs at a time, by default as many as the cluster has cores, memory and GPUs for.
    Raises ResourceError where there is no cluster, ConfigError where a node lacks this deepstack.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        study: str,
        out: Path,
        workers: int | None = None,
        address: str | None = None,
    ) -> None:
        self.study, self.out, self._limit = study, out.absolute(), workers
        self._plugins = plugin_files()
        self._at_end = ExitStack()
        self.ray, was_unconnected = connect(address)
        if was_unconnected:
            self._at_end.callback(self.ray.shutdown)
        self._messages: dict[str, list[dict[str, Any]]] = {}
        self._collected = self._asked_nodes = 0.0
        self._numbers = count(1)
        self._known: list[dict[str, Any]] = []
        try:
            with self.cluster():
                self._gpu_bytes = check_nodes(self.ray, self._nodes())
            self.workers = workers or max(self._capacity(cells), 1)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Create the mailbox on the sweep's node and the token by which nodes know its folder.

        The token is a locked file; unlocked ones of killed sweeps are removed.
        """
        with self.cluster():
            here = self.ray.get_runtime_context().get_node_id()
            self._mailbox = self.ray.remote(mailbox_class()).options(
                num_cpus=0, scheduling_strategy=pinned(here)
            ).remote()  # fmt: skip
            self._task = self.ray.remote(task(deepstack.__version__))
        folder = self.out / self.study
        for leftover in folder.glob(f"{TOKEN}*"):
            if files.holder(leftover) is None:
                leftover.unlink(missing_ok=True)
        self._token = folder / f"{TOKEN}{secrets.token_hex(16)}"
        self._at_end.enter_context(files.locked(self._token))
        self._at_end.callback(self._token.unlink, missing_ok=True)
        return self

    def has_capacity(self, cell: Cell, running: Sequence[Cell]) -> bool:
        if self._limit is not None:
            return len(running) < self._limit
        return not running or self._fits([*running, cell])

    def start(self, cell: Cell) -> Process:
        order = Order(
            config=config_yaml(cell),
            folder=cell.folder.name,
            name=run_name(cell.config),
            study=self.study,
            out=str(self.out),
            here=os.getcwd(),
            token=(str(self._token), self._token.read_text()),
            plugins=self._plugins,
            resources=self.resources_of(cell),
        )
        return Process(self, cell.folder, order, next(self._numbers))

    def close(self) -> None:
        self._at_end.close()

    def resources_of(self, cell: Cell) -> dict[str, float]:
        """Return a run's cores, bytes of memory, and share of a GPU: 0, 1, or less if small."""
        required = requirements_of(cell, has_gpu=max(self._on_nodes("GPU"), default=0) > 0)
        gpu = required.gpu_memory
        return {
            "num_cpus": required.cores,
            "num_gpus": share_of_gpu(gpu, self._gpu_bytes) if gpu else 0,
            # Ray would wait for ever for a node with more memory than any has.
            "memory": int(min(required.memory, max(self._on_nodes("memory"), default=0))),
        }

    def too_large(self, resources: dict[str, float]) -> str | None:
        """Return why no node can ever hold a run, None if one may."""
        for name, text in (
            ("num_cpus", "cores; fewer with runtime.threads=…"),
            ("num_gpus", "GPU; without one: runtime.device=cpu"),
        ):
            if resources[name] > max(self._on_nodes(RESOURCES[name]), default=0):
                return f"no node of the Ray cluster has {resources[name]:g} {text}"
        return None

    def submit(self, order: Order, key: str) -> Any:
        """Submit a run to Ray; max_retries=0 because the sweep itself submits it again."""
        options = {
            "max_retries": 0, "scheduling_strategy": "SPREAD", "name": f"deepstack {order.folder}"
        }  # fmt: skip
        with self.cluster():
            submitted = self._task.options(**options, **order.resources)
            return submitted.remote(vars(order), self._mailbox, key)

    def send(self, key: str, message: dict[str, Any]) -> None:
        """Put a message for a task into the mailbox."""
        with self.cluster():
            self.ray.get(self._mailbox.send.remote(key, message), timeout=ANSWER_SECONDS)

    def receive(self, key: str, *, now: bool = False) -> list[dict[str, Any]]:
        """Return the messages of a task since the last call."""
        if now or time.monotonic() - self._collected > COLLECT_SECONDS:
            with self.cluster():
                collected = self.ray.get(self._mailbox.collect.remote(), timeout=ANSWER_SECONDS)
            for other, message in collected:
                self._messages.setdefault(other, []).append(message)
            self._collected = time.monotonic()
        return self._messages.pop(key, [])

    @contextmanager
    def cluster(self) -> Iterator[None]:
        """Turn the loss of the whole cluster into a ResourceError."""
        try:
            yield
        except (self.ray.exceptions.RayError, ConnectionError, TimeoutError) as error:
            raise ResourceError(f"the Ray cluster does not answer: {first_line(error)}") from error

    def _nodes(self) -> list[dict[str, Any]]:
        """Return the nodes that are alive, at most NODES_SECONDS ago."""
        if time.monotonic() - self._asked_nodes > NODES_SECONDS:
            with self.cluster():
                self._known = [node for node in self.ray.nodes() if node["Alive"]]
            self._asked_nodes = time.monotonic()
        return self._known

    def _on_nodes(self, key: str) -> list[float]:
        """Return how much of a resource each node has."""
        return [node["Resources"].get(key, 0) for node in self._nodes()]

    def _fits(self, cells: Sequence[Cell]) -> bool:
        required = [self.resources_of(cell) for cell in cells]
        return all(
            sum(run[name] for run in required) <= sum(self._on_nodes(key)) + 1e-6
            for name, key in RESOURCES.items()
        )

    def _capacity(self, cells: Sequence[Cell]) -> int:
        """Return how many of the cells, the largest first, fit into the cluster at a time."""
        numbers = range(1, len(cells) + 1)
        return len(list(takewhile(lambda number: self._fits(cells[-number:]), numbers)))


class Process:
    """A run on the cluster, submitted again when its node is lost."""

    def __init__(self, cluster: OnRay, folder: RunFolder, order: Order, number: int) -> None:
        self._cluster, self._folder = cluster, folder
        self._order, self._number = order, number
        self._lock = ExitStack()
        self._synced = False
        self._signal = 0
        self._code: int | None = None
        self._stderr = ""
        if problem := cluster.too_large(order.resources):
            self._end(ResourceError.exit_code, problem)
        else:
            self._submit()

    def poll(self) -> int | None:
        """Exit code, negative for the signal that ended it; None while it runs."""
        if self._code is not None:
            return self._code
        try:
            with self._cluster.cluster():
                ended = bool(self._cluster.ray.wait([self._task], timeout=0)[0])
            for message in self._cluster.receive(self._key, now=ended):
                self._handle(message)
            if ended:
                self._take_result()
        except DeepstackError as error:  # the folder is locked, the disk full, the cluster lost
            with suppress(ResourceError):
                self.send_signal(signal.SIGTERM)
            self._end(error.exit_code, str(error))
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended; a run that has not begun is cancelled."""
        if self._code is not None:
            return
        self._signal = number
        self._cluster.send(self._key, {"signal": int(number)})
        if not self._begun:
            self._cluster.ray.cancel(self._task)

    def stderr_text(self) -> str:
        """Return its stderr."""
        return self._stderr

    @property
    def _key(self) -> str:
        return f"{self._number}.{self._order.lost}"

    def _submit(self) -> None:
        self._begun = False
        self._task = self._cluster.submit(self._order, self._key)

    def _handle(self, message: dict[str, Any]) -> None:
        if "changes" in message:
            write_changes(self._folder, FolderChanges(**message["changes"]))
            return
        content = None
        if not message["shared"]:
            if not self._synced:
                self._lock.enter_context(self._folder.lock())
                self._synced = True
            if self._folder.exists():
                content = vars(Source(self._folder).changes())
        self._begun = True
        self._cluster.send(self._key, {"begin": content})

    def _take_result(self) -> None:
        ray = self._cluster.ray
        try:
            self._end(*ray.get(self._task))
        except ray.exceptions.TaskCancelledError:
            self._end(128 + (self._signal or signal.SIGTERM), "")
        except ray.exceptions.RayTaskError as error:
            self._end(1, str(error))
        except ray.exceptions.RayError as error:
            if self._signal:
                self._end(128 + self._signal, "")
            elif self._order.lost >= LOST_AT_MOST:
                text = f"lost {LOST_AT_MOST + 1} times with its node, last: {first_line(error)}"
                self._end(128 + signal.SIGTERM, text)
            else:
                self._cluster.send(self._key, {"signal": int(signal.SIGTERM)})  # if it still runs
                self._order = replace(self._order, lost=self._order.lost + 1)
                self._submit()

    def _end(self, code: int, stderr: str) -> None:
        self._code, self._stderr = code, stderr
        self._lock.close()


def share_of_gpu(needed: int, available: int | None) -> float:
    """Return 1/n of a GPU if n runs of this size fit together, else 1."""
    if available is None:
        return 1.0
    return 1 / max(1, min(PER_GPU_AT_MOST, available // max(needed, 1)))


def first_line(error: BaseException) -> str:
    """Return the first line of an error of Ray, without the pages that follow."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
