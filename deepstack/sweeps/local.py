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

    budget: as for `local_resources`.  Raises ResourceError if a run asks for a GPU and there
    is none.
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
        self.resources = local_resources(cells, workers, budget=budget)
        self._arguments = train_arguments(study, out)
        self._reserved: dict[Process, Reservation] = {}
        self._server: ForkServer | None = None

    def has_capacity(self, cell: Cell, running: Sequence[Cell]) -> bool:
        return self._reserve(cell) is not None

    def _reserve(self, cell: Cell) -> Reservation | None:
        """Return a reservation beside those of the runs that have not ended."""
        working = {p: reservation for p, reservation in self._reserved.items() if p.poll() is None}
        self._reserved = working
        return self.resources.reserve(cell, list(working.values()))

    def start(self, cell: Cell) -> Process:
        reservation = self._reserve(cell)
        assert reservation is not None, "call has_capacity before start"
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


def local_resources(cells: Sequence[Cell], workers: int, *, budget: int | None = None) -> Resources:
    """Return the resources of this machine for these runs, with the GPUs that they would use.

    budget: bytes of memory for all runs together, by default most of the free memory.  Raises
    ResourceError if a run requires a GPU and there is none.
    """
    runtimes = {repr(cell.config.runtime): cell.config.runtime for cell in cells}
    devices = {choose_device(runtime).type for runtime in runtimes.values()}
    gpus = visible_gpus() if "cuda" in devices else []
    return Resources(workers, memory_budget() if budget is None else budget, gpus)


def default_workers(cells: Sequence[Cell]) -> int:
    """Return the cores divided by the threads of the widest run, also for runs on a GPU."""
    return max(cores() // most_threads(cells), 1)


def most_threads(cells: Sequence[Cell]) -> int:
    """Return the largest number of threads of a run."""
    return max((choose_threads(cell.config) for cell in cells), default=1)
