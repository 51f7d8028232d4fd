"""Runs on this machine: as many at once as there are cores or GPUs for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deepstack import config as conf
from deepstack.sweeps import starter
from deepstack.sweeps.launcher import Launcher, train_words
from deepstack.sweeps.plan import Cell
from deepstack.training import choose_device, choose_threads


class Local(Launcher):
    """One process a run on this machine, forked from one that has imported everything."""

    def __init__(self, cells: Sequence[Cell], study: str, out: Path, workers: int) -> None:
        self.study, self.out, self.workers = study, out, workers
        self._free = gpu_slots(cells, workers)
        self._held: dict[starter.Process, str | None] = {}
        self._started = 0
        self._folder = tempfile.TemporaryDirectory(prefix="deepstack-")
        self._starter = starter.Starter()

    def has_room(self, cell: Cell, running: Sequence[Cell]) -> bool:
        return len(running) < self.workers

    def start(self, cell: Cell) -> starter.Process:
        for process in [p for p in self._held if p.poll() is not None]:
            self._free.append(self._held.pop(process))
        beside = Path(self._folder.name, f"{self._started:06d}")
        self._started += 1
        config = beside.with_suffix(".yaml")
        config.write_text(conf.to_yaml(cell.config), encoding="utf-8")
        gpu = self._free.pop(0)
        words = train_words(config, out=self.out, study=self.study)
        seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        process = self._starter.start(words, beside.with_suffix(".err"), seen)
        self._held[process] = gpu
        return process

    def close(self) -> None:
        self._starter.close()
        self._folder.cleanup()


def gpu_slots(cells: Sequence[Cell], workers: int) -> list[str | None]:
    """Which GPU each worker's runs see, in turn over those visible here; None on a CPU."""
    import torch

    if not any(choose_device(cell.config.runtime).type == "cuda" for cell in cells):
        return [None] * workers
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return [visible[worker % len(visible)] for worker in range(workers)]


def default_workers(cells: Sequence[Cell]) -> int:
    """GPUs where the runs use them, else cores divided by the threads of the widest run."""
    import torch

    if any(choose_device(cell.config.runtime).type == "cuda" for cell in cells):
        return max(torch.cuda.device_count(), 1)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max((choose_threads(cell.config) for cell in cells), default=1)
    return max((cores or 1) // threads, 1)
