"""What this machine has room for: the memory of runs beside each other, GPUs and theirs."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepstack import config as conf
from deepstack.errors import ConfigError
from deepstack.sweeps.needs import needs_of
from deepstack.sweeps.plan import Cell

# Of the memory that is free, the share that runs may take together.
SHARE = 0.9
# What CUDA keeps on a GPU for each process besides its tensors.
CONTEXT_BYTES = 600 * 2**20
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 10 ** (3 * i) for i, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}IB": 2 ** (10 * i) for i, prefix in enumerate("KMGT", start=1)}


@dataclass(frozen=True)
class Gpu:
    """name: as CUDA_VISIBLE_DEVICES has it; free: bytes, None where nobody could tell."""

    name: str
    free: int | None = None


@dataclass(frozen=True)
class Place:
    """What a run holds while it runs.

    memory: bytes of the host; limited: whether it may take no more than them; gpu: its name;
    gpu_memory: bytes of it.
    """

    memory: int
    limited: bool = True
    gpu: str | None = None
    gpu_memory: int = 0


class Room:
    """Which runs fit beside those that run already.

    workers: runs at a time; budget: bytes of the host for all of them; gpus: those to share.
    """

    def __init__(self, workers: int, budget: int, gpus: Sequence[Gpu] = ()) -> None:
        self.workers, self.budget, self.gpus = workers, budget, list(gpus)

    def place(self, cell: Cell, taken: Sequence[Place]) -> Place | None:
        """What the cell's run would hold beside the places taken; None where there is no room.

        With nothing else running there is always room: the run itself finds out.
        """
        if len(taken) >= self.workers:
            return None
        gpu = self._on_gpu(cell)
        needs = needs_of(cell, gpu=gpu)
        # an equal share at least, so that a limit is never tighter than it need be
        memory = min(self.budget, max(needs.memory, self.budget // self.workers))
        if gpu:  # what CUDA maps is no use of memory: such a run is given no limit
            memory = min(self.budget, needs.memory)
        if taken and sum(place.memory for place in taken) + memory > self.budget:
            return None
        if not gpu:
            return Place(memory)
        wanted = needs.gpu_memory + CONTEXT_BYTES
        chosen = self._gpu(wanted, taken)
        return None if chosen is None else Place(memory, False, chosen.name, wanted)

    def too_small(self, cell: Cell) -> str:
        """What may not hold the cell's run even alone, in words; '' where all of it does."""
        gpu = self._on_gpu(cell)
        needs = needs_of(cell, gpu=gpu)
        if needs.memory > self.budget:
            return f"the {self.budget / 1e6:,.0f} MB that all runs have together"
        free = [gpu.free for gpu in self.gpus if gpu.free is not None]
        if gpu and free and needs.gpu_memory + CONTEXT_BYTES > max(free):
            return f"the {max(free) / 1e6:,.0f} MB that are free on a GPU"
        return ""

    def _on_gpu(self, cell: Cell) -> bool:
        return bool(self.gpus) and cell.config.runtime.device != "cpu"

    def _gpu(self, wanted: int, taken: Sequence[Place]) -> Gpu | None:
        """The GPU with most memory left, if that suffices; else one that no run is on."""
        left: dict[str, int] = {}
        for gpu in self.gpus:
            used = [place.gpu_memory for place in taken if place.gpu == gpu.name]
            left[gpu.name] = (0 if used else 2**62) if gpu.free is None else gpu.free - sum(used)
        by_room = sorted(self.gpus, key=lambda gpu: -left[gpu.name])
        if left[by_room[0].name] >= wanted:
            return by_room[0]
        busy = {place.gpu for place in taken}
        return next((gpu for gpu in by_room if gpu.name not in busy), None)


def available_memory() -> int:
    """Bytes that can be taken now without swapping, of the machine or within a cgroup's limit."""
    whole = conf.machine_memory()
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        found = None
    return min(whole, 1024 * int(found[1])) if found else whole


def memory_budget(given: str | None = None) -> int:
    """Bytes for all runs together: '8GB', '512MiB', a share such as '0.5', or 0.9 of what is free.

    Raises ConfigError for anything else.
    """
    if given is None:
        return int(SHARE * available_memory())
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
    return int(number * (unit if match[2] else available_memory()))


def visible_gpus() -> list[Gpu]:
    """The GPUs that processes started here would see, with the memory that is free on each.

    Asks nvidia-smi: a CUDA context in this process would stay for the whole sweep.
    """
    import torch

    by_name: dict[str, Gpu] = {}
    listed: list[Gpu] = []
    for line in _ask_for_gpus().splitlines():
        index, uuid, free = (part.strip() for part in line.split(","))
        bytes_free = int(free) * 2**20 if free.isdecimal() else None
        listed.append(Gpu(uuid, bytes_free))
        by_name |= {index: Gpu(index, bytes_free), uuid: Gpu(uuid, bytes_free)}
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        names = [name.strip() for name in named.split(",") if name.strip()]
        return [by_name.get(name, Gpu(name)) for name in names]
    return listed or [Gpu(str(index)) for index in range(torch.cuda.device_count())]


def _ask_for_gpus() -> str:
    words = ["nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
