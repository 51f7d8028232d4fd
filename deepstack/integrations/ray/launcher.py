"""Runs on the nodes of a Ray cluster that the user has started: one task a run.

    OnRay (in the sweep) -- orders --> Mailbox (an actor beside it) <-- messages -- work() (node)

If a node is lost, the sweep itself submits the task again, not Ray: the checkpoints that the node
had sent back go along, and the run resumes from them.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepstack.base import DeepstackError, ResourceError
from deepstack.integrations.ray.cluster import (
    ANSWER_SECONDS,
    check_nodes,
    connect,
    mailbox_class,
    pinned,
    plugin_files,
)
from deepstack.integrations.ray.folder_sync import FolderChanges, Source, write_changes
from deepstack.integrations.ray.node import Order, train_on_node
from deepstack.records import RunFolder, trouble
from deepstack.sweeps import Cell, Launcher, Requirements

LOST_AT_MOST = 5  # a run that crashes its node each time must not crash all nodes
PER_GPU_AT_MOST = 8
FILE = '"$0"'  # of a command, the argument of its shell
Resources = dict[str, float]
# The names of resources: as options of a task, and of a node.
RESOURCES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}


class OnRay(Launcher):
    """One task a run on the cluster at `address` (default: RAY_ADDRESS, or the one of this host).

    workers: runs at a time, by default as many as the cluster has cores, memory and GPUs for.

    Raises ResourceError where there is no cluster, ConfigError where a node lacks this deepstack.
    """

    def __init__(
        self, study: str, out: Path, workers: int | None = None, address: str | None = None
    ) -> None:
        self.study, self.out, self._limit = study, out.absolute(), workers
        self._running: list[RayProcess] = []
        self._plugins = plugin_files()
        self.ray = connect(address)
        with self.cluster():
            self._gpu_bytes = check_nodes(self.ray)
            here = self.ray.get_runtime_context().get_node_id()
            mailbox = self.ray.remote(mailbox_class())
            placed = mailbox.options(num_cpus=0, scheduling_strategy=pinned(here))
            self._mailbox = placed.remote()
            self._task = self.ray.remote(train_on_node)
        folder = self.out / study
        with trouble(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._token = tempfile.NamedTemporaryFile(prefix=".ray-", dir=folder)

    def start(self, cell: Cell) -> RayProcess | None:
        self._running = [process for process in self._running if process.poll() is None]
        nodes = self.nodes()
        required = cell.requirements(has_gpu=most_of_a_node(nodes, "GPU") > 0)
        resources = resources_of(required, nodes, self._gpu_bytes)
        in_use = [process.order.resources for process in self._running]
        if not has_capacity(resources, in_use, nodes, self._limit):
            return None
        cell.claim()
        job = cell.job(self.study, self.out, FILE, required.cores)
        order = Order(
            config=job.text,
            command="" if job.trains else job.command,
            folder=cell.folder.name,
            study=self.study,
            out=str(self.out),
            here=os.getcwd(),
            token=self._token.name,
            plugins=self._plugins,
            resources=resources,
        )
        process = RayProcess(self, cell.folder, order)
        self._running.append(process)
        return process

    def close(self) -> None:
        self._token.close()

    def submit(self, order: Order) -> Any:
        """Submit a run to Ray; max_retries=0 because the sweep itself submits it again."""
        options = {
            "max_retries": 0, "scheduling_strategy": "SPREAD", "name": f"deepstack {order.folder}"
        }  # fmt: skip
        with self.cluster():
            task = self._task.options(**options, **order.resources)
            return task.remote(order, self._mailbox)

    def has_ended(self, task: Any) -> bool:
        """Return whether a submitted run has ended, well or badly."""
        with self.cluster():
            return bool(self.ray.wait([task], timeout=0)[0])

    def send(self, key: str, message: dict[str, Any]) -> None:
        """Put a message for a task into the mailbox."""
        with self.cluster():
            self.ray.get(self._mailbox.send.remote(key, message), timeout=ANSWER_SECONDS)

    def receive(self, key: str) -> list[dict[str, Any]]:
        """Return the messages of a task since the last call."""
        messages: list[dict[str, Any]]
        with self.cluster():
            messages = self.ray.get(self._mailbox.receive.remote(key), timeout=ANSWER_SECONDS)
        return messages

    @contextmanager
    def cluster(self) -> Iterator[None]:
        """Turn the loss of the whole cluster into a ResourceError."""
        try:
            yield
        except (self.ray.exceptions.RayError, ConnectionError, TimeoutError) as error:
            raise ResourceError(f"the Ray cluster does not answer: {first_line(error)}") from error

    def nodes(self) -> list[Resources]:
        """Return the resources of every node that is alive."""
        with self.cluster():
            return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]


class RayProcess:
    """A run on the cluster, submitted again when its node is lost."""

    def __init__(self, cluster: OnRay, folder: RunFolder, order: Order) -> None:
        self.order, self._cluster, self._folder = order, cluster, folder
        self._lock = ExitStack()  # of the copy, if the node does not share the folder
        self._locked = self._begun = False
        self._signal = 0
        self._code: int | None = None
        self._stderr = ""
        try:
            refuse_too_large(order.resources, cluster.nodes())
            self._task = cluster.submit(order)
        except ResourceError as error:
            self._end(error.exit_code, str(error))

    def poll(self) -> int | None:
        """Exit code, negative for the signal that ended it; None while it runs."""
        if self._code is not None:
            return self._code
        try:
            # Asked first: a task that has ended sends nothing after the messages below.
            ended = self._cluster.has_ended(self._task)
            for message in self._cluster.receive(self.order.key):
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
        self._cluster.send(self.order.key, {"signal": int(number)})
        if not self._begun:
            self._cluster.ray.cancel(self._task)

    def stderr_text(self) -> str:
        """Return its stderr."""
        return self._stderr

    def _handle(self, message: dict[str, Any]) -> None:
        if "changes" in message:
            write_changes(self._folder, FolderChanges(*message["changes"]))
            return
        content = FolderChanges([], [])
        if not message["shared"]:
            if not self._locked:
                self._lock.enter_context(self._folder.lock())
                self._locked = True
            content = Source(self._folder).changes()
        self._begun = True
        self._cluster.send(self.order.key, {"begin": tuple(content)})

    def _take_result(self) -> None:
        ray = self._cluster.ray
        try:
            self._end(*ray.get(self._task))
        except ray.exceptions.RayTaskError as error:
            self._end(1, str(error))
        except ray.exceptions.RayError as error:  # cancelled, or its node is lost
            if self._signal:
                self._end(128 + self._signal, "")
            elif self.order.lost >= LOST_AT_MOST:
                text = f"lost {LOST_AT_MOST + 1} times with its node, last: {first_line(error)}"
                self._end(128 + signal.SIGTERM, text)
            else:
                # If it still runs, it saves and ends.
                self._cluster.send(self.order.key, {"signal": int(signal.SIGTERM)})
                self.order = replace(self.order, lost=self.order.lost + 1)
                self._begun, self._task = False, self._cluster.submit(self.order)

    def _end(self, code: int, stderr: str) -> None:
        self._code, self._stderr = code, stderr
        self._lock.close()


def resources_of(
    required: Requirements, nodes: Sequence[Resources], gpu_bytes: int | None
) -> Resources:
    """Return a run's cores, bytes of memory, and share of a GPU: 0, 1, or less if small.

    gpu_bytes: of the cluster's smallest GPU, None if unknown.
    """
    gpu = required.gpu_memory
    return {
        "num_cpus": required.cores,
        "num_gpus": share_of_gpu(gpu, gpu_bytes) if gpu else 0,
        # Ray would wait for ever for a node with more memory than any has.
        "memory": int(min(required.memory, most_of_a_node(nodes, "memory"))),
    }


def has_capacity(
    resources: Resources, in_use: Sequence[Resources], nodes: Sequence[Resources], limit: int | None
) -> bool:
    """Return whether a run fits beside those that run.

    limit: the number of runs at a time, which counts alone; by default the nodes' resources do.

    A run that is alone always fits; if it is too large for a node, it is refused when submitted.
    """
    if limit is not None:
        return len(in_use) < limit
    return not in_use or all(
        sum(run[name] for run in (*in_use, resources)) <= sum(n.get(key, 0) for n in nodes) + 1e-6
        for name, key in RESOURCES.items()
    )


def refuse_too_large(resources: Resources, nodes: Sequence[Resources]) -> None:
    """Raise ResourceError for a run that no node can ever hold."""
    for name, text in (
        ("num_cpus", "cores; fewer with runtime.threads=…"),
        ("num_gpus", "GPU; without one: runtime.device=cpu"),
    ):
        if resources[name] > most_of_a_node(nodes, RESOURCES[name]):
            raise ResourceError(f"no node of the Ray cluster has {resources[name]:g} {text}")


def most_of_a_node(nodes: Sequence[Resources], key: str) -> float:
    """Return the most that a node has of a resource."""
    return max((node.get(key, 0) for node in nodes), default=0)


def share_of_gpu(needed: int, available: int | None) -> float:
    """Return 1/n of a GPU if n runs of this size fit together, else 1."""
    if available is None:
        return 1.0
    return 1 / max(1, min(PER_GPU_AT_MOST, available // max(needed, 1)))


def first_line(error: BaseException) -> str:
    """Return the first line of an error of Ray, without the pages that follow."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
