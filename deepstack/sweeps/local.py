"""Runs on this machine: as many at once as there are cores, memory and GPUs for."""

import os
import subprocess
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ByteSize, TypeAdapter

from deepstack import config as conf
from deepstack.base import plugins
from deepstack.base.errors import ConfigError
from deepstack.sweeps.fork_server import ForkedProcess, ForkServer
from deepstack.sweeps.plan import (
    Cell,
    CellCache,
    is_wanted,
    named_in_errors,
    requirements_of,
    train_arguments,
)
from deepstack.sweeps.pool import Launcher
from deepstack.training import RunPlan, choose_device, choose_threads, find_parts

# The share of the free memory that all runs together may use.
SHARE = 0.9
# The memory that CUDA keeps on a GPU for each process, besides its tensors.
CONTEXT_BYTES = 600 * 2**20
SIZE = TypeAdapter(ByteSize)


class Local(Launcher):
    """Starts runs on this machine, in processes forked from one that has imported everything.

    A run on a CPU has a process of its own.  Runs on a GPU follow each other in the same process,
    which opens CUDA and compiles once; with plugins, which may keep state, they do not.

    budget: bytes of memory for all runs together, by default most of the free memory.

    Raises ResourceError if a run asks for a GPU and there is none.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        study: str,
        out: Path,
        workers: int,
        *,
        budget: int | None = None,
    ) -> None:
        devices = {choose_device(runtime).type for runtime in {c.config.runtime for c in cells}}
        gpus = visible_gpus() if "cuda" in devices else []
        self.resources = Resources(workers, memory_budget() if budget is None else budget, gpus)
        self._arguments = train_arguments(study, out)
        self._reserved: dict[ForkedProcess, Reservation] = {}
        self._idle = Counter[str]()  # workers that have ended a run, by the name of their GPU
        self._server: ForkServer | None = None

    def start(self, cell: Cell) -> ForkedProcess | None:
        for ended in [process for process in self._reserved if process.poll() is not None]:
            held = self._reserved.pop(ended)
            if held.gpu is not None and ended.leaves_worker:
                self._idle[held.gpu] += 1
        reservation = self.resources.reserve(cell, list(self._reserved.values()))
        if reservation is None:
            if self._server is not None and self._idle:  # the waiting run may need their memory
                self._server.end_idle_workers(self._idle.total())
                self._idle.clear()
            return None
        cell.claim()
        if self._server is None or not self._server.is_alive:
            self.close()
            self._server = ForkServer()
            self._idle.clear()
        # On a GPU without a limit: CUDA maps much more host memory than it uses.
        gpu, memory = reservation.gpu, reservation.memory if reservation.gpu is None else None
        environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        keep = gpu is not None and not plugins.LOADED
        self._idle -= Counter([gpu] if gpu is not None else [])
        process = self._server.start(
            conf.to_yaml(cell.config), self._arguments, environment, memory=memory, keep=keep
        )
        self._reserved[process] = reservation
        return process

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def default_workers(cells: Sequence[Cell]) -> int:
    """Return the cores divided by the threads of the widest run; a run on a GPU takes two cores.

    One core launches kernels, another one serves the backward pass and the compiler.
    """
    threads = 1
    for cell in cells:
        device = cell.config.runtime.device
        on_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        threads = max(threads, choose_threads(cell.config, on_gpu=on_gpu), 1 + on_gpu)
    return max(conf.cores() // threads, 1)


@dataclass(frozen=True)
class Gpu:
    """name: as in CUDA_VISIBLE_DEVICES; free: bytes, 0 if unknown."""

    name: str
    free: int = 0


@dataclass(frozen=True)
class Reservation:
    """The resources of one run: bytes of host memory, a GPU's name, and bytes of that GPU."""

    memory: int
    gpu: str | None = None
    gpu_memory: int = 0


class Resources:
    """Reserves workers, host memory and GPUs for runs.

    workers: runs at a time.
    budget: bytes of the host for all of them.
    gpus: those to share.
    """

    def __init__(self, workers: int, budget: int, gpus: Sequence[Gpu] = ()) -> None:
        self.workers, self.budget, self.gpus = workers, budget, list(gpus)

    def reserve(self, cell: Cell, taken: Sequence[Reservation]) -> Reservation | None:
        """Return a reservation for the cell beside those taken, or None if it does not fit.

        A run that is alone always gets one; if memory is short, the run itself reports it.
        """
        if len(taken) >= self.workers:
            return None
        required = requirements_of(cell, has_gpu=bool(self.gpus))
        memory = required.memory
        if not required.gpu_memory:  # an equal share at least: no limit is tighter than necessary
            memory = max(memory, self.budget // self.workers)
        memory = min(self.budget, memory)
        if taken and sum(other.memory for other in taken) + memory > self.budget:
            return None
        if not required.gpu_memory:
            return Reservation(memory)
        gpu_memory = required.gpu_memory + CONTEXT_BYTES
        gpu = self._choose_gpu(gpu_memory, taken)
        return None if gpu is None else Reservation(memory, gpu.name, gpu_memory)

    def _choose_gpu(self, required: int, taken: Sequence[Reservation]) -> Gpu | None:
        """Return the GPU with the most free memory if it suffices, else one without a run."""

        def free(gpu: Gpu) -> int:
            return gpu.free - sum(other.gpu_memory for other in taken if other.gpu == gpu.name)

        most_free_first = sorted(self.gpus, key=free, reverse=True)
        if free(most_free_first[0]) >= required:
            return most_free_first[0]
        busy = {other.gpu for other in taken}
        return next((gpu for gpu in most_free_first if gpu.name not in busy), None)


def memory_budget(given: str | None = None) -> int:
    """Return the bytes for all runs together: '8GB', '512MiB', or a share of free memory as '0.5'.

    The default is SHARE of the free memory.  Raises ConfigError for anything else.
    """
    size = 0
    try:
        share = SHARE if given is None else float(given)
        if 0 < share <= 1:
            size = int(share * conf.available_memory())
    except ValueError:
        with suppress(ValueError):
            size = SIZE.validate_python(given)
    if given is not None and size < 1:
        raise ConfigError(
            f"--memory: found {given!r}; allowed a size with its unit such as 8GB or 512MiB, or a "
            "share of what is free, at most 1, such as 0.5"
        )
    return size


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that a process started here would see, with the free memory of each.

    Asks nvidia-smi, because a CUDA context of this process would last for the whole sweep.
    """
    names: list[str] = []
    free: dict[str, int] = {}
    for line in query_gpus().splitlines():
        index, uuid, size = line.split(", ")
        names.append(uuid)
        free[index] = free[uuid] = int(size) * 2**20 if size.isdecimal() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
    elif not names:
        names = [str(index) for index in range(torch.cuda.device_count())]
    return [Gpu(name, free.get(name, 0)) for name in names]


def query_gpus() -> str:
    """Return nvidia-smi's lines 'index, uuid, free MiB', or '' without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def refuse_missing(cells: Sequence[Cell], retry: Collection[str] = ()) -> None:
    """Raise ConfigError if a run that is to start needs a tracker or a run that is not here."""
    cache, seen = CellCache(), set()
    for cell in cells:
        config = cell.config
        names, start = tuple(config.log.to), config.model.start
        key = (names, repr((config.model, config.task)) if start else "")  # without seed and rate
        if not (names or start) or key in seen or not is_wanted(cell, retry):
            continue
        seen.add(key)
        with named_in_errors(cell.values):
            find_parts(RunPlan(config, cache.task(config)))
