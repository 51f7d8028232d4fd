"""Runs on this machine: as many at once as there are cores, memory and GPUs for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from deepstack import config as conf
from deepstack.records import trouble
from deepstack.sweeps import starter
from deepstack.sweeps.launcher import Launcher, train_words
from deepstack.sweeps.plan import Cell
from deepstack.sweeps.room import Gpu, Place, Room, memory_budget, visible_gpus
from deepstack.training import choose_device, choose_threads, cores


class Local(Launcher):
    """One process a run on this machine, forked from one that has imported everything.

    budget: bytes of memory for all runs together, None for most of what is free; gpus: those to
    share, None for those that are visible here.  Raises ResourceError when a run asks for a GPU
    and there is none.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        study: str,
        out: Path,
        workers: int,
        *,
        budget: int | None = None,
        gpus: Sequence[Gpu] | None = None,
    ) -> None:
        self.study, self.out = study, out
        self.room = room_here(cells, workers, budget=budget, gpus=gpus)
        self._held: dict[starter.Process, Place] = {}
        self._starter: starter.Starter | None = None
        self._started = 0

    def __enter__(self) -> Self:
        self._starter = starter.Starter()
        return self

    def has_room(self, cell: Cell, running: Sequence[Cell]) -> bool:
        if self._starter is not None and not self._starter.ready:
            return False  # it would wait, and its time would run
        return self.room.place(cell, self._taken()) is not None

    def start(self, cell: Cell) -> starter.Process:
        place = self.room.place(cell, self._taken())
        assert place is not None, "start what has_room said there is room for"
        if self._starter is None or not self._starter.alive:
            self.close()
            self._starter = starter.Starter()
        beside = self._starter.folder / f"{self._started:06d}"
        self._started += 1
        config = beside.with_suffix(".yaml")
        errors = beside.with_suffix(".err")
        with trouble(config):
            config.write_text(conf.to_yaml(cell.config), encoding="utf-8")
            errors.touch()
        words = train_words(config, out=self.out, study=self.study)
        process = self._starter.start(
            words,
            errors,
            {} if place.gpu is None else {"CUDA_VISIBLE_DEVICES": place.gpu},
            memory=place.memory if place.limited else None,
        )
        self._held[process] = place
        return process

    def _taken(self) -> list[Place]:
        for process in [p for p in self._held if p.poll() is not None]:
            del self._held[process]
        return list(self._held.values())

    def close(self) -> None:
        if self._starter is not None:
            self._starter.close()
        self._held.clear()


def room_here(
    cells: Sequence[Cell],
    workers: int,
    *,
    budget: int | None = None,
    gpus: Sequence[Gpu] | None = None,
) -> Room:
    """The room that this machine has for such runs; what is None as in `Local`."""
    if gpus is None:
        gpus = visible_gpus() if any_on_gpu(cells) else []
    return Room(workers, memory_budget() if budget is None else budget, gpus)


def any_on_gpu(cells: Sequence[Cell]) -> bool:
    """Whether any run would use a GPU here.  ResourceError where one is asked for in vain."""
    runtimes = {repr(cell.config.runtime): cell.config.runtime for cell in cells}
    return any([choose_device(runtime).type == "cuda" for runtime in runtimes.values()])


def default_workers(cells: Sequence[Cell]) -> int:
    """Cores divided by the threads of the widest run; each run on a GPU needs a core too."""
    return max(cores() // most_threads(cells), 1)


def most_threads(cells: Sequence[Cell]) -> int:
    """The threads of the run that takes most of them."""
    return max((choose_threads(cell.config) for cell in cells), default=1)
