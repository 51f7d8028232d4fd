"""One process a run, as many at once as there are cores or GPUs for."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deepstack import config as conf
from deepstack import plugins
from deepstack.records import Run
from deepstack.sweeps.plan import RUN_AGAIN, Cell
from deepstack.sweeps.starter import Process, Starter
from deepstack.training import choose_device, choose_threads

POLL_SECONDS = 0.1


@dataclass
class Progress:
    """One cell while the sweep goes on: what its folder says, and its process while it has one."""

    cell: Cell
    state: str
    process: Process | None = None
    gpu: str | None = None
    errors: Path | None = None
    began: float = 0.0
    step: int = 0
    loss: float | None = None
    model_update: float | None = None
    message: str = ""
    first_step: int = 0

    @property
    def seconds_left(self) -> float | None:
        """By the pace of this process so far; None before its first step."""
        made = self.step - self.first_step
        if self.process is None or made <= 0:
            return None
        return (time.monotonic() - self.began) / made * (self.cell.config.train.steps - self.step)


@dataclass
class Pool:
    """Runs cells in processes of their own; what one of them does to itself stays its own."""

    cells: Sequence[Cell]
    study: str
    out: Path
    workers: int
    retry: bool = False
    stop: Callable[[], int | None] = lambda: None
    show: Callable[[Sequence[Progress]], None] = lambda progress: None
    progress: list[Progress] = field(init=False)
    _free: list[str | None] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.progress = [Progress(cell, cell.state) for cell in self.cells]

    def run(self) -> list[Progress]:
        """Run what is not done, in order; returns when no process is left.

        A stop request is handed on to the running processes, which save and end.
        """
        waiting = [p for p in self.progress if self._wanted(p)]
        for entry in waiting:
            entry.state = "waiting"
        handed_on = False
        self._free = gpu_slots(self.cells, self.workers)
        with tempfile.TemporaryDirectory(prefix="deepstack-") as folder, Starter() as starter:
            try:
                while waiting or self._running():
                    number = self.stop()
                    if number and not handed_on:
                        handed_on = True
                        for entry in waiting:
                            entry.state = "interrupted" if entry.cell.folder.exists() else "new"
                        waiting.clear()
                        for entry in self._running():
                            assert entry.process is not None
                            entry.process.send_signal(number)
                    while waiting and len(self._running()) < self.workers:
                        self._start(starter, waiting.pop(0), Path(folder))
                    time.sleep(POLL_SECONDS)
                    for entry in self._running():
                        self._look_at(entry)
                    self.show(self.progress)
            finally:
                for entry in self._running():
                    assert entry.process is not None
                    entry.process.send_signal(signal.SIGKILL)
        return self.progress

    def _wanted(self, entry: Progress) -> bool:
        if entry.state in ("done", "diverged"):
            self._read(entry)
            return False
        return self.retry or entry.state not in RUN_AGAIN

    def _running(self) -> list[Progress]:
        return [p for p in self.progress if p.process is not None]

    def _start(self, starter: Starter, entry: Progress, folder: Path) -> None:
        name = f"{self.progress.index(entry):06d}"
        config = folder / f"{name}.yaml"
        config.write_text(conf.to_yaml(entry.cell.config), encoding="utf-8")
        entry.errors = folder / f"{name}.err"
        entry.gpu = self._free.pop(0)
        environment = {} if entry.gpu is None else {"CUDA_VISIBLE_DEVICES": entry.gpu}
        words = ["train", str(config), "--quiet", "--out", str(self.out), "--study", self.study]
        for path in plugins.PATHS:
            words += ["--plugin", str(path)]
        entry.process = starter.start(words, entry.errors, environment)
        entry.state, entry.began = "running", time.monotonic()
        self._read(entry)
        entry.first_step = entry.step

    def _look_at(self, entry: Progress) -> None:
        assert entry.process is not None and entry.errors is not None
        code = entry.process.poll()
        self._read(entry)
        if code is None:
            return
        entry.process = None
        self._free.append(entry.gpu)
        run = Run(entry.cell.folder.path)
        entry.state = run.state if run.folder.exists() else "failed"
        if entry.state not in ("done", "diverged", "interrupted", "out_of_memory"):
            entry.state = "failed"
        if code not in (0, 130, 143) and entry.state in ("interrupted", "failed"):
            entry.state = "failed"
            said = entry.errors.read_text(errors="replace").strip().splitlines()
            entry.message = said[-1] if said else f"ended with exit code {code}"

    def _read(self, entry: Progress) -> None:
        """Step, loss and model update from the last row on disk; no lock is needed for that."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            path = entry.cell.folder.steps_path
            with open(path, "rb") as file:
                names = file.readline().decode().strip().split(",")
                file.seek(max(0, path.stat().st_size - 2048))
                rows = file.read().split(b"\n")[:-1]  # what follows the last newline is torn
            row = dict(zip(names, rows[-1].decode().split(","), strict=True))
            entry.step, entry.loss = int(row["step"]), float(row["loss"])
            entry.model_update = float(row["model_update"])


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
