"""Runs on this machine: as many at once as there are cores, memory and GPUs for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deepstack import config as conf
from deepstack.sweeps.fork_server import ForkServer, Process
from deepstack.sweeps.launcher import Launcher, train_arguments
from deepstack.sweeps.plan import Cell
from deepstack.sweeps.resources import Reservation, Resources, memory_budget, visible_gpus
from deepstack.training import choose_device, choose_threads, cores


class Local(Launcher):
    """Starts one process a run on this machine, forked from one that has imported everything.

    budget: bytes of memory for all runs together, by default most of the free memory.  Raises
    ResourceError if a run asks for a GPU and there is none.
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
        runtimes = {repr(cell.config.runtime): cell.config.runtime for cell in cells}
        devices = {choose_device(runtime).type for runtime in runtimes.values()}
        gpus = visible_gpus() if "cuda" in devices else []
        self.resources = Resources(workers, memory_budget() if budget is None else budget, gpus)
        self._arguments = train_arguments(study, out)
        self._reserved: dict[Process, Reservation] = {}
        self._server: ForkServer | None = None

    def start(self, cell: Cell) -> Process | None:
        self._reserved = {p: held for p, held in self._reserved.items() if p.poll() is None}
        reservation = self.resources.reserve(cell, list(self._reserved.values()))
        if reservation is None:
            return None
        if self._server is None or not self._server.is_alive:
            self.close()
            self._server = ForkServer()
        # On a GPU without a limit: CUDA maps much more host memory than it uses.
        gpu, memory = reservation.gpu, reservation.memory if reservation.gpu is None else None
        environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        process = self._server.start(
            conf.to_yaml(cell.config), self._arguments, environment, memory=memory
        )
        self._reserved[process] = reservation
        return process

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


def default_workers(cells: Sequence[Cell]) -> int:
    """Return the cores divided by the threads of the widest run, also for runs on a GPU."""
    threads = max((choose_threads(cell.config) for cell in cells), default=1)
    return max(cores() // threads, 1)
