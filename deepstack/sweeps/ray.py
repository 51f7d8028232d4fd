"""Runs on the nodes of a Ray cluster that the user has started: one task a run.

    OnRay (in the sweep) -- orders --> Mailbox (an actor beside it) <-- news -- work() (on a node)

A task that is lost with its node is sent again by the sweep, not by Ray: what the node had sent
back by then goes along, and the run goes on from there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from deepstack.errors import DeepstackError, ResourceError
from deepstack.records import RunFolder, files
from deepstack.sweeps.folder_sync import FolderChanges, Source, Target
from deepstack.sweeps.launcher import Launcher
from deepstack.sweeps.plan import Cell
from deepstack.sweeps.ray_cluster import (
    ANSWER_SECONDS,
    ask_nodes,
    connect,
    mailbox_class,
    pinned,
    plugin_files,
    task,
)
from deepstack.sweeps.ray_node import Order
from deepstack.sweeps.requirements import Requirements, config_yaml, requirements_of
from deepstack.training import run_name

COLLECT_SECONDS = 0.3
LOOK_SECONDS = 2.0
LOST_AT_MOST = 5  # a run that takes its node along each time must not take them all
PER_GPU_AT_MOST = 8
TOKEN = ".ray-"


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
        self.ray, self._ours = connect(address)
        self._holding = contextlib.ExitStack()
        self._news: dict[str, list[dict[str, Any]]] = {}
        self._collected = self._looked = 0.0
        self._started = 0
        self._known: list[dict[str, Any]] = []
        try:
            with self.cluster():
                self._gpu_bytes = ask_nodes(self.ray, self._nodes())
            self.workers = workers or max(self._capacity(cells), 1)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        with self.cluster():
            self._begin()
        return self

    def _begin(self) -> None:
        """The mailbox on the sweep's own node, and the token by which others know its folder.

        The token is a file that is held: what sweeps that were killed have left is free, and goes.
        """
        here = self.ray.get_runtime_context().get_node_id()
        self._mailbox = self.ray.remote(mailbox_class()).options(
            num_cpus=0, scheduling_strategy=pinned(here)
        ).remote()  # fmt: skip
        self._task = self.ray.remote(task(metadata.version("deepstack")))
        folder = self.out / self.study
        for left in folder.glob(f"{TOKEN}*"):
            if files.holder(left) is None:
                left.unlink(missing_ok=True)
        self._token = folder / f"{TOKEN}{secrets.token_hex(16)}"
        self._holding.enter_context(files.locked(self._token))

    def has_capacity(self, cell: Cell, running: Sequence[Cell]) -> bool:
        if self._limit is not None:
            return len(running) < self._limit
        return not running or self._fit([*running, cell])

    def start(self, cell: Cell) -> Process:
        needs, share = self.asked_by(cell)
        self._started += 1
        order = Order(
            config=config_yaml(cell),
            folder=cell.folder.name,
            alone=run_name(cell.config),
            study=self.study,
            out=str(self.out),
            here=os.getcwd(),
            token=(str(self._token), self._token.read_text()),
            plugins=self._plugins,
            cores=needs.cores,
            memory=needs.memory,
            gpu=share > 0,
        )
        resources = {"num_cpus": needs.cores, "num_gpus": share, "memory": needs.memory}
        return Process(self, cell.folder, order, resources, self._started)

    def close(self) -> None:
        if hasattr(self, "_token"):
            self._token.unlink(missing_ok=True)
        self._holding.close()
        if self._ours:
            self._ours = False
            self.ray.shutdown()

    def asked_by(self, cell: Cell) -> tuple[Requirements, float]:
        """Cores and memory of a run, and its share of a GPU: 0, 1, or less for small ones."""
        required = requirements_of(cell, has_gpu=self._most("GPU") > 0)
        share = share_of_gpu(required.gpu_memory, self._gpu_bytes) if required.gpu_memory else 0.0
        # Ray would wait for ever for a node with more memory than any has.
        return replace(required, memory=int(min(required.memory, self._most("memory")))), share

    def too_large(self, resources: dict[str, float]) -> str | None:
        """Why no node will ever have room for a run; None when one may."""
        for name, key, what in (
            ("num_cpus", "CPU", "cores; fewer with runtime.threads=…"),
            ("num_gpus", "GPU", "GPU; without one: runtime.device=cpu"),
        ):
            if resources[name] > self._most(key):
                return f"no node of the Ray cluster has {resources[name]:g} {what}"
        return None

    def submit(self, order: Order, resources: dict[str, float], key: str) -> Any:
        """Hand a run to Ray; max_retries=0 because the sweep itself sends it again."""
        options = {
            "max_retries": 0, "scheduling_strategy": "SPREAD", "name": f"deepstack {order.folder}"
        }  # fmt: skip
        with self.cluster():
            return self._task.options(**options, **resources).remote(
                vars(order), self._mailbox, key
            )

    def say(self, key: str, word: dict[str, Any]) -> None:
        """Put a word for a task into the mailbox."""
        with self.cluster():
            self.ray.get(self._mailbox.say.remote(key, word), timeout=ANSWER_SECONDS)

    def heard(self, key: str, *, now: bool = False) -> list[dict[str, Any]]:
        """What a task has said since the last time."""
        if now or time.monotonic() - self._collected > COLLECT_SECONDS:
            with self.cluster():
                found = self.ray.get(self._mailbox.collect.remote(), timeout=ANSWER_SECONDS)
            for other, word in found:
                self._news.setdefault(other, []).append(word)
            self._collected = time.monotonic()
        return self._news.pop(key, [])

    @contextlib.contextmanager
    def cluster(self) -> Iterator[None]:
        """Turn the loss of the whole cluster into a ResourceError."""
        try:
            yield
        except (self.ray.exceptions.RayError, ConnectionError, TimeoutError) as error:
            raise ResourceError(f"the Ray cluster does not answer: {first_line(error)}") from error

    def _nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive, asked for again from time to time."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            with self.cluster():
                self._known = [node for node in self.ray.nodes() if node["Alive"]]
            self._looked = time.monotonic()
        return self._known

    def _most(self, key: str) -> float:
        """The most that one node has of a resource."""
        return max((node["Resources"].get(key, 0) for node in self._nodes()), default=0)

    def _all(self, key: str) -> float:
        """What the nodes have of a resource together."""
        return sum(node["Resources"].get(key, 0) for node in self._nodes())

    def _fit(self, cells: Sequence[Cell]) -> bool:
        asked = [self.asked_by(cell) for cell in cells]
        return (
            sum(needs.cores for needs, _ in asked) <= self._all("CPU")
            and sum(needs.memory for needs, _ in asked) <= self._all("memory")
            and sum(share for _, share in asked) <= self._all("GPU") + 1e-6
        )

    def _capacity(self, cells: Sequence[Cell]) -> int:
        """How many of the cells, the largest first, the cluster has room for at a time."""
        count = 0
        for cell in reversed(cells):
            if not self._fit([*cells[len(cells) - count :], cell]):
                break
            count += 1
        return count


class Process:
    """A run on the cluster, started again where its node is lost."""

    def __init__(
        self,
        cluster: OnRay,
        folder: RunFolder,
        order: Order,
        resources: dict[str, float],
        number: int,
    ) -> None:
        self._cluster, self._folder, self._order = cluster, folder, order
        self._resources, self._number = resources, number
        self._held = contextlib.ExitStack()
        self._target: Target | None = None
        self._begun = False
        self._signal = 0
        self._code: int | None = None
        self._said = ""
        if problem := cluster.too_large(resources):
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
            for word in self._cluster.heard(self._key, now=ended):
                self._hear(word)
            if ended:
                self._take_result()
        except DeepstackError as error:  # the folder is another's, the disk full, the cluster gone
            self._refuse(error)
        return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended; one that has not begun will not begin."""
        if self._code is not None:
            return
        self._signal = number
        self._cluster.say(self._key, {"signal": int(number)})
        if not self._begun:
            self._cluster.ray.cancel(self._task)

    def stderr_text(self) -> str:
        """What it wrote to stderr."""
        return self._said

    @property
    def _key(self) -> str:
        return f"{self._number}.{self._order.before}"

    def _submit(self) -> None:
        self._begun = False
        self._task = self._cluster.submit(self._order, self._resources, self._key)

    def _hear(self, word: dict[str, Any]) -> None:
        if "shared" in word:
            there = None
            if not word["shared"]:
                if self._target is None:
                    self._held.enter_context(self._folder.lock())
                    self._target = Target(self._folder)
                if self._folder.exists():
                    there = vars(Source(self._folder).news())
            self._begun = True
            self._cluster.say(self._key, {"begin": there})
        if "news" in word and self._target is not None:
            self._target.write(FolderChanges(**word["news"]))

    def _refuse(self, error: DeepstackError) -> None:
        """Give the run up because of what its folder is like here."""
        with contextlib.suppress(ResourceError):
            self.send_signal(signal.SIGTERM)
        self._end(error.exit_code, str(error))

    def _take_result(self) -> None:
        ray = self._cluster.ray
        errors = ray.exceptions
        try:
            code, said = ray.get(self._task)
            self._end(code, said)
        except errors.TaskCancelledError:
            self._end(128 + (self._signal or signal.SIGTERM), "")
        except errors.RayTaskError as error:
            self._end(1, str(error))
        except errors.RayError as error:
            if self._signal:
                self._end(128 + self._signal, "")
            elif self._order.before >= LOST_AT_MOST:
                text = f"lost {LOST_AT_MOST + 1} times with its node, last: {first_line(error)}"
                self._end(128 + signal.SIGTERM, text)
            else:
                self._cluster.say(self._key, {"signal": int(signal.SIGTERM)})  # if it is not gone
                self._order = replace(self._order, before=self._order.before + 1)
                self._submit()

    def _end(self, code: int, said: str) -> None:
        self._code, self._said = code, said
        self._held.close()


def share_of_gpu(needed: int, there: int | None) -> float:
    """1/n of a GPU where n runs of this size fit together, else 1."""
    if there is None:
        return 1.0
    return 1 / max(1, min(PER_GPU_AT_MOST, there // max(needed, 1)))


def first_line(error: BaseException) -> str:
    """What an error of Ray says, without the pages that follow."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
