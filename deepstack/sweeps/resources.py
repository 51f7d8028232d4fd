"""The memory and GPUs of this machine, and their reservation for runs beside each other."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from deepstack import config as conf
from deepstack.errors import ConfigError
from deepstack.sweeps.plan import Cell
from deepstack.sweeps.requirements import requirements_of

# The share of the free memory that all runs together may use.
SHARE = 0.9
# The memory that CUDA keeps on a GPU for each process, besides its tensors.
CONTEXT_BYTES = 600 * 2**20
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 10 ** (3 * i) for i, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}IB": 2 ** (10 * i) for i, prefix in enumerate("KMGT", start=1)}


@dataclass(frozen=True)
class Gpu:
    """name: as in CUDA_VISIBLE_DEVICES; free: bytes, None if unknown."""

    name: str
    free: int | None = None


@dataclass(frozen=True)
class Reservation:
    """The resources of one run: bytes of host memory, a GPU's name, and bytes of that GPU.

    limited: False for a run on a GPU, because CUDA maps much more host memory than it uses.
    """

    memory: int
    gpu: str | None = None
    gpu_memory: int = 0

    @property
    def limited(self) -> bool:
        return self.gpu is None


class Resources:
    """Reserves workers, host memory and GPUs for runs.

    workers: runs at a time; budget: bytes of the host for all of them; gpus: those to share.
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

    def too_small(self, cell: Cell) -> str:
        """Describe the memory that may be too small for the cell's run alone; '' if none is."""
        required = requirements_of(cell, has_gpu=bool(self.gpus))
        if required.memory > self.budget:
            return f"the {self.budget / 1e6:,.0f} MB that all runs have together"
        free = max((gpu.free for gpu in self.gpus if gpu.free is not None), default=None)
        if required.gpu_memory and free is not None and required.gpu_memory + CONTEXT_BYTES > free:
            return f"the {free / 1e6:,.0f} MB that are free on a GPU"
        return ""

    def _choose_gpu(self, required: int, taken: Sequence[Reservation]) -> Gpu | None:
        """Return the GPU with the most free memory if it suffices, else one without a run."""
        free: dict[str, int] = {}
        for gpu in self.gpus:
            used = [other.gpu_memory for other in taken if other.gpu == gpu.name]
            free[gpu.name] = (0 if used else 2**62) if gpu.free is None else gpu.free - sum(used)
        most_free_first = sorted(self.gpus, key=lambda gpu: -free[gpu.name])
        if free[most_free_first[0].name] >= required:
            return most_free_first[0]
        busy = {other.gpu for other in taken}
        return next((gpu for gpu in most_free_first if gpu.name not in busy), None)


def memory_budget(given: str | None = None) -> int:
    """Return the bytes for all runs together: '8GB', '512MiB', or a share of free memory as '0.5'.

    The default is SHARE of the free memory.  Raises ConfigError for anything else.
    """
    if given is None:
        return int(SHARE * conf.available_memory())
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", given)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) == 0:
        raise ConfigError(
            f"--memory: found {given!r}; allowed a size such as 8GB or 512MiB, or a share of what "
            "is free such as 0.5"
        )
    number = float(match[1])
    if not match[2] and number > 1:
        raise ConfigError(
            f"--memory: found {given!r}, a size without a unit; did you mean {match[1]}GB? A share "
            "of what is free is at most 1"
        )
    return int(number * (unit if match[2] else conf.available_memory()))


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that a process started here would see, with the free memory of each.

    Asks nvidia-smi, because a CUDA context of this process would last for the whole sweep.
    """
    import torch

    by_name: dict[str, Gpu] = {}
    listed: list[Gpu] = []
    for line in query_gpus().splitlines():
        index, uuid, free = (part.strip() for part in line.split(","))
        bytes_free = int(free) * 2**20 if free.isdecimal() else None
        listed.append(Gpu(uuid, bytes_free))
        by_name |= {index: Gpu(index, bytes_free), uuid: Gpu(uuid, bytes_free)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",") if name.strip()]
        return [by_name.get(name, Gpu(name)) for name in names]
    return listed or [Gpu(str(index)) for index in range(torch.cuda.device_count())]


def query_gpus() -> str:
    """Return nvidia-smi's lines 'index, uuid, free MiB', or '' without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
