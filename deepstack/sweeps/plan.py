"""A sweep's plan: every cell expanded, validated and estimated before anything runs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from deepstack import config as conf
from deepstack.errors import ConfigError, PluginError, ResourceError
from deepstack.model import build_model, with_defaults, without_defaults
from deepstack.records import ENDED, Run, RunFolder
from deepstack.registry import unknown
from deepstack.tasks import Task, task_of
from deepstack.training import choose_folder, free_folder, refuse_missing_plugins, run_name

MOST_CELLS = 100_000
FINISHED = ENDED
RUN_AGAIN = ("failed", "out_of_memory")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep: its configuration, its folder, and what it will take.

    state: 'new', or that of the folder's run; parameters: a number; memory: bytes.  values: the
    swept keys' own; overridden: what an override of the sweep's file set besides.
    """

    config: conf.Config
    folder: RunFolder
    state: str
    parameters: int
    memory: int
    values: dict[str, Any] = field(default_factory=dict)
    overridden: dict[str, Any] = field(default_factory=dict)

    @property
    def work(self) -> int:
        """Layers times tokens times steps: what the cells are ordered by, cheap first."""
        train, model = self.config.train, self.config.model
        per_layer = model.d_model * (model.d_model + (model.d_ff or 0))
        layers = sum(conf.depths(self.config))
        return layers * train.batch_size * self.config.task.seq_len * train.steps * per_layer

    def claim(self) -> None:
        """Let a folder whose name has a number say whose it is, so that `train` finds it too.

        Another run has the name without the number.  Raises ResourceError as `train` would.
        """
        numbered = self.folder.name.startswith(f"{run_name(self.config)}-")
        if numbered and not self.folder.exists():
            with self.folder.lock():
                self.folder.write_config(conf.to_yaml(with_defaults(self.config)))


def is_wanted(cell: Cell, retry: Collection[str] = ()) -> bool:
    """Whether a sweep runs the cell: not what is done or damaged, what failed only if asked to."""
    if cell.state == "damaged":
        return False
    return cell.state not in FINISHED and (cell.state not in RUN_AGAIN or cell.state in retry)


def retry_states(text: str | None) -> frozenset[str]:
    """The states that `--retry` names: failed, out_of_memory, or all; several with commas.

    Raises ConfigError for any other word.
    """
    chosen: set[str] = set()
    for word in (part.strip() for part in (text or "").split(",") if part.strip()):
        if word not in (*RUN_AGAIN, "all"):
            raise ConfigError(unknown("--retry", word, [*RUN_AGAIN, "all"]))
        chosen |= {*RUN_AGAIN} if word == "all" else {word}
    return frozenset(chosen)


def expand(
    base: conf.Config | conf.Study, grid: Mapping[str, Sequence[Any]] | None = None
) -> list[conf.Config]:
    """Every cell of a study, or every combination of a grid's values, as configurations.

    Equal ones occur once.  Raises ConfigError for an empty list of values, a value that is not
    allowed, or a grid so large that it must be a mistake.
    """
    return [config for config, _, _ in _expanded(base, grid)]


def axis(key: str, values: object) -> list[Any]:
    """The values of one axis of a grid; ConfigError where it is a value alone."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ConfigError(
            f"sweep.grid.{key}: found {values!r}; allowed a list of values, such as [{values!r}]"
        )
    return list(values)


def _expanded(
    base: conf.Config | conf.Study, grid: Mapping[str, Sequence[Any]] | None
) -> list[tuple[conf.Config, str, conf.Combination]]:
    """(configuration, run's name, what makes it differ) of every cell."""
    if isinstance(base, conf.Config):
        base = conf.Study(base, {key: axis(key, values) for key, values in (grid or {}).items()})
    for key, values in base.grid.items():
        if not values:
            raise ConfigError(f"sweep.grid.{key}: found no value; give at least one")
    if base.total > MOST_CELLS:
        sizes = " x ".join(f"{len(v)} {k}" for k, v in base.grid.items())
        raise ConfigError(
            f"sweep.grid: {base.total:,} runs ({sizes}); allowed at most {MOST_CELLS:,}: "
            "give fewer values"
        )
    cells: list[tuple[conf.Config, str, conf.Combination]] = []
    called: dict[str, list[conf.Config]] = {}  # six digits of a hash: two cells may be called alike
    bare_of = Bare()
    for combination in base.combinations():
        with of_the_run(combination):
            cell = conf.with_overrides(base.base, combination.settings)
            conf.refuse_absurd(cell)
        bare = bare_of(cell)
        name = conf.run_name(bare)
        alike = called.setdefault(name, [])
        if not any(conf.same_experiment(bare, other) for other in alike):
            alike.append(bare)
            cells.append((cell, name, combination))
    return cells


@contextmanager
def of_the_run(combination: conf.Combination) -> Iterator[None]:
    """Add what makes a run differ from the others to the errors that it meets."""
    try:
        yield
    except PluginError:
        raise
    except ConfigError as error:
        said = ", ".join(f"{key}={value}" for key, value in combination.values.items())
        where = f"in the run of {said}: " if said else ""
        raise ConfigError(f"{where}{error}", key=error.key) from None


class Bare:
    """`without_defaults`, without asking the same task and scheme for their defaults again."""

    def __init__(self) -> None:
        self._known: dict[str, conf.Config] = {}

    def __call__(self, config: conf.Config) -> conf.Config:
        # what is left of the options depends on nothing else
        task, model = config.task, config.model
        key = f"{task!r} {model.scheme} {json.dumps(model.scheme_options, sort_keys=True)}"
        bare = self._known.get(key)
        if bare is None:
            bare = self._known[key] = without_defaults(config)
        options = {"scheme_options": bare.model.scheme_options}
        model = model.model_copy(update=options)
        return config.model_copy(update={"task": bare.task, "model": model})


def plan(
    base: conf.Config | conf.Study,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    study: str,
    out: Path,
) -> list[Cell]:
    """The cells of a sweep, cheap first, each with its folder and present state.

    base: a study, or a configuration together with a grid, {dotted key: values}.
    """
    estimated = Estimates()
    there = names_in(out / study)
    cells = []
    taken: set[str] = set()
    for config, name, combination in _expanded(base, grid):
        state = "new"
        with of_the_run(combination):
            vocab_size = estimated.vocab_size(config)
            parameters = estimated.parameters(config, vocab_size)
        if name in there:
            try:
                refuse_missing_plugins(config, out / study)
                folder = choose_folder(config, out / study, estimated.task(config), taken)
                state = Run(folder.path).state if folder.exists() else "new"
            except ResourceError:
                folder, state = RunFolder(out / study / name), "damaged"
        else:
            folder = free_folder(out / study, name, taken)
        taken.add(folder.path.name)
        cells.append(
            Cell(
                config=config,
                folder=folder,
                state=state,
                parameters=parameters,
                memory=conf.memory_estimate(config, vocab_size),
                values=combination.values,
                overridden=combination.overridden,
            )
        )
    return sorted(cells, key=lambda cell: cell.work)


def names_in(study: Path) -> set[str]:
    """The names of runs in a study's folder, without the numbers of those called alike."""
    try:
        found = os.listdir(study)
    except OSError:
        return set()
    return {*found, *(re.sub(r"-\d+$", "", name) for name in found)}


class Estimates:
    """Tasks and numbers of parameters, each built once for all the cells that share it."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._vocabularies: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, int, int]] = {}

    def task(self, config: conf.Config) -> Task:
        """The task of a configuration."""
        key = f"{config.task!r} {config.seed} {config.model.family}"
        if key not in self._tasks:
            self._tasks[key] = task_of(config)
        return self._tasks[key]

    def vocab_size(self, config: conf.Config) -> int:
        """The task's vocabulary, which no seed changes."""
        key = f"{config.task!r} {config.model.family}"
        if key not in self._vocabularies:
            self._vocabularies[key] = self.task(config).vocab_size
        return self._vocabularies[key]

    def parameters(self, config: conf.Config, vocab_size: int) -> int:
        """The exact number of parameters, from three shallow stacks without storage.

        It is linear in depth, or quadratic where a layer weighs all layers before it.
        """
        shape = _shape(config, vocab_size)
        if shape not in self._shapes:
            one, two, three = (count_at(config, vocab_size, depth) for depth in (1, 2, 3))
            self._shapes[shape] = one, two, three
        one, two, three = self._shapes[shape]
        more = config.model.depth - 1
        return one + more * (two - one) + more * (more - 1) // 2 * (three - 2 * two + one)


def _shape(config: conf.Config, vocab_size: int) -> str:
    """All that the number of parameters depends on but for the depth."""
    model = config.model.model_copy(update={"depth": 1})
    return f"{model!r} {vocab_size} {config.task.seq_len} {config.train.trainable}"


def count_at(config: conf.Config, vocab_size: int, depth: int) -> int:
    """The number of parameters of the same stack at another depth."""
    shallow = conf.with_overrides(config, {"model.depth": depth})
    built = build_model(shallow, vocab_size=vocab_size, device=torch.device("meta"))
    return sum(built.banks.count().values())


def count_parameters(config: conf.Config, vocab_size: int) -> int:
    """The exact number of parameters of one configuration."""
    return Estimates().parameters(config, vocab_size)
