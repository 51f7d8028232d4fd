"""A sweep's plan: every cell expanded, validated and estimated before anything runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepstack import config as conf
from deepstack.errors import ConfigError
from deepstack.model import build_model
from deepstack.records import Run, RunFolder
from deepstack.tasks import Task, task_of
from deepstack.training import choose_folder, refuse_missing_plugins, run_name

MOST_CELLS = 100_000
RUN_AGAIN = ("failed", "out_of_memory")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its configuration, its folder, and what it will take.

    state: 'new', or what the folder's run says; parameters: a number; memory: bytes.
    """

    config: conf.Config
    folder: RunFolder
    state: str
    parameters: int
    memory: int

    @property
    def work(self) -> int:
        """Layers times tokens times steps: what the cells are ordered by, cheap first."""
        train, model = self.config.train, self.config.model
        per_layer = model.d_model * (model.d_model + (model.d_ff or 0))
        layers = sum(conf.depths(self.config))
        return layers * train.batch_size * self.config.task.seq_len * train.steps * per_layer


def expand(base: conf.Config, grid: Mapping[str, Sequence[Any]]) -> list[conf.Config]:
    """Every combination of the grid's values, as configurations; equal ones once.

    Raises ConfigError for an empty list of values, a value that is not allowed, or a grid so large
    that it must be a mistake.
    """
    total = 1
    for key, values in grid.items():
        if not values:
            raise ConfigError(f"sweep.grid.{key}: found no value; give at least one")
        total *= len(values)
    if total > MOST_CELLS:
        sizes = " x ".join(f"{len(v)} {k}" for k, v in grid.items())
        raise ConfigError(
            f"sweep.grid: {total:,} runs ({sizes}); allowed at most {MOST_CELLS:,}: "
            "give fewer values"
        )
    cells: dict[str, conf.Config] = {}
    for values in itertools.product(*grid.values()):
        cell = conf.with_overrides(base, dict(zip(grid, values, strict=True)))
        cells.setdefault(run_name(cell), cell)
    return list(cells.values())


def plan(
    base: conf.Config, grid: Mapping[str, Sequence[Any]], *, study: str, out: Path
) -> list[Cell]:
    """The cells of a sweep, cheap first, each with its folder and present state."""
    cells = []
    tasks: dict[str, Task] = {}
    for config in expand(base, grid):
        refuse_missing_plugins(config, out / study)
        key = f"{config.task!r} {config.seed} {config.model.family}"
        if key not in tasks:
            tasks[key] = task_of(config)
        folder = choose_folder(config, out / study, tasks[key])
        cells.append(
            Cell(
                config=config,
                folder=folder,
                state=Run(folder.path).state if folder.exists() else "new",
                parameters=count_parameters(config, tasks[key].vocab_size),
                memory=conf.memory_estimate(config, tasks[key].vocab_size),
            )
        )
    return sorted(cells, key=lambda cell: cell.work)


def count_parameters(config: conf.Config, vocab_size: int) -> int:
    """The exact number of parameters, from three shallow stacks without storage.

    It is linear in depth, or quadratic where a layer weighs all layers before it.
    """

    def at(depth: int) -> int:
        shallow = conf.with_overrides(config, {"model.depth": depth})
        built = build_model(shallow, vocab_size=vocab_size, device=torch.device("meta"))
        return sum(built.banks.count().values())

    one, two, three = at(1), at(2), at(3)
    more = config.model.depth - 1
    return one + more * (two - one) + more * (more - 1) // 2 * (three - 2 * two + one)
