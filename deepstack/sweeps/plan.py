"""A sweep's plan: every cell expanded, validated and estimated before anything runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepstack import config as conf
from deepstack.base import plugins
from deepstack.base.errors import ConfigError, PluginError, ResourceError
from deepstack.base.registry import unknown
from deepstack.model import (
    build_model,
    extra_memory,
    with_defaults,
    with_steps,
    without_defaults,
)
from deepstack.records import ENDED, Run, RunFolder
from deepstack.tasks import Task, task_of
from deepstack.training import (
    RunPlan,
    choose_folder,
    choose_threads,
    refuse_missing_plugins,
    run_name,
)

RUN_AGAIN = ("failed", "out_of_memory")
# An estimate is between 0.7 and 1.5 of the memory that is used.
MARGIN = 1.5
# The host memory of CUDA, its libraries and torch beside the tensors on the GPU.
GPU_HOST_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Cell:
    """One cell of a sweep's grid: its configuration, its folder and its estimated size.

    state: 'new', or the state of the folder's run.
    parameters: a number.
    memory: bytes.
    flops: of all training steps, without the probe.
    values: of the swept keys.
    overridden: further keys that an override of the sweep's file set, and the width to which
        model.parameters led.
    """

    config: conf.Config
    folder: RunFolder
    state: str
    parameters: int
    memory: int
    values: dict[str, Any] = field(default_factory=dict)
    overridden: dict[str, Any] = field(default_factory=dict)
    flops: int = 0

    def claim(self) -> None:
        """Write the configuration to a folder with a numbered name, so that `train` finds it.

        Another run has the name without the number.  Raises ResourceError as `train` would.
        """
        numbered = self.folder.name.startswith(f"{run_name(self.config)}-")
        if numbered and not self.folder.exists():
            with self.folder.lock():
                self.write_config()

    def requirements(self, *, has_gpu: bool) -> Requirements:
        """Return what this cell needs on a machine with or without a GPU."""
        return requirements_of(self, has_gpu=has_gpu)

    def job(self, study: str, out: Path, file: str, cores: int) -> Job:
        """Return how another program runs this cell.

        file: the place of the job's file, quoted for a shell.
        cores: those that the cell reserves.
        """
        words = [sys.executable, "-m", "deepstack", "train"], train_arguments(study, out.absolute())
        before, after = map(shlex.join, words)
        return Job(config_yaml(self, cores), f"{before} {file} {after}")

    def write_config(self) -> None:
        """Write config.yaml as `train` does, if there is none; the caller holds the lock."""
        if not self.folder.exists():
            self.folder.write_config(conf.to_yaml(with_defaults(self.config)))


def is_wanted(cell: Cell, retry: Collection[str] = ()) -> bool:
    """False for finished or damaged runs, and for failed ones unless `retry` names them."""
    return cell.state in retry or cell.state not in (*ENDED, *RUN_AGAIN, "damaged")


def retry_states(text: str | None) -> frozenset[str]:
    """Return the states that `--retry` names: failed, out_of_memory, or all, with commas.

    Raises ConfigError for any other word.
    """
    words = [part.strip() for part in (text or "").split(",") if part.strip()]
    for word in words:
        if word not in (*RUN_AGAIN, "all"):
            raise ConfigError(unknown("--retry", word, [*RUN_AGAIN, "all"]))
    return frozenset(RUN_AGAIN if "all" in words else words)


def expand(
    base: conf.Config | conf.Study, grid: Mapping[str, Sequence[Any]] | None = None
) -> list[conf.Config]:
    """Return the configuration of every cell of a study or grid, equal ones once.

    Raises ConfigError for an empty list of values, a value that is not allowed, or more than
    conf.MAX_RUNS cells.
    """
    return [config for config, _ in _cells(as_study(base, grid), CellCache())]


def as_study(
    config: conf.Config | conf.Study, grid: Mapping[str, Sequence[Any]] | None = None
) -> conf.Study:
    """Return the study of a configuration and a grid; a study is returned as it is.

    Raises ConfigError for an axis with a single value in place of a list.
    """
    if isinstance(config, conf.Study):
        return config
    axes: dict[str, list[Any]] = {}
    for key, values in (grid or {}).items():
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            example = f"allowed a list of values, such as [{values!r}]"
            raise ConfigError(f"sweep.grid.{key}: found {values!r}; {example}")
        axes[key] = list(values)
    return conf.Study(config, axes)


def _cells(study: conf.Study, cache: CellCache) -> Iterator[tuple[conf.Config, conf.Combination]]:
    """Yield the configuration and the swept values of every cell, equal ones once."""
    for key, values in study.grid.items():
        if not values:
            raise ConfigError(f"sweep.grid.{key}: found no value; give at least one")
    if study.total > conf.MAX_RUNS:
        sizes = " x ".join(f"{len(v)} {k}" for k, v in study.grid.items())
        raise ConfigError(
            f"sweep.grid: {study.total:,} runs ({sizes}); allowed at most {conf.MAX_RUNS:,}: "
            "give fewer values"
        )
    seen: set[str] = set()
    for combination in study.combinations():
        with named_in_errors(combination.values):
            config = conf.with_overrides(study.base, combination.settings)
            conf.refuse_absurd(config, extra_memory(config))
            combination = with_width(combination, config.model)
            config = with_steps(config, cache.task)
        digest = conf.digest(without_defaults(config))
        if digest not in seen:
            seen.add(digest)
            yield config, combination


def with_width(combination: conf.Combination, model: conf.Model) -> conf.Combination:
    """Return a cell with the width to which `model.parameters` leads, if it is given."""
    if model.parameters is None:
        return combination
    chosen = {"model.parameters": model.parameters, "model.d_model": model.d_model}
    more = {key: value for key, value in chosen.items() if key not in combination.values}
    return replace(combination, overridden=combination.overridden | more)


@contextmanager
def named_in_errors(values: Mapping[str, Any]) -> Iterator[None]:
    """Add the values of a cell to a ConfigError of the block."""
    try:
        yield
    except PluginError:
        raise
    except ConfigError as error:
        text = ", ".join(f"{key}={value}" for key, value in values.items())
        where = f"in the run of {text}: " if text else ""
        raise ConfigError(f"{where}{error}", key=error.key) from None


def plan(
    base: conf.Config | conf.Study,
    grid: Mapping[str, Sequence[Any]] | None = None,
    *,
    study: str,
    out: Path,
) -> list[Cell]:
    """Return the cells of a sweep, cheap first, each with its folder and present state.

    base: a study, or a configuration together with a grid, {dotted key: values}.
    """
    cache = CellCache()
    cells = []
    used_names: set[str] = set()
    for config, combination in _cells(as_study(base, grid), cache):
        with named_in_errors(combination.values):
            run = RunPlan(config, cache.task(config), out / study)
            parameters = cache.parameters(config, run.task.vocab_size)
        try:
            refuse_missing_plugins(config, run.study)
            folder = choose_folder(run, used_names)
            state = Run(folder.path).state if folder.exists() else "new"
        except ResourceError:
            folder, state = RunFolder(run.study / run.name), "damaged"
        used_names.add(folder.name)
        flops = config.train.steps * run.flops.step
        values, overridden = combination.values, combination.overridden
        cells.append(Cell(config, folder, state, parameters, run.memory, values, overridden, flops))
    return sorted(cells, key=lambda cell: (cell.flops, cell.parameters))


class CellCache:
    """Computes the values that cells share once: tasks and numbers of parameters."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[object, ...], Task] = {}
        self._counts: dict[tuple[object, ...], list[int]] = {}

    def task(self, config: conf.Config) -> Task:
        """Return the task of a configuration, whose vocabulary and data do not depend on seeds."""
        key = (repr(config.task), config.model.family)
        if key not in self._tasks:
            self._tasks[key] = task_of(config)
        return self._tasks[key]

    def parameters(self, config: conf.Config, vocab_size: int) -> int:
        """Return the exact number of parameters, extrapolated from three shallow stacks.

        It is linear in depth, or quadratic if a layer has a weight for each earlier layer.  A
        looped stack is built whole.
        """
        if config.model.unique_layers:
            return count_parameters(config, vocab_size, config.model.depth)
        model = config.model.model_copy(update={"depth": 1})
        key = (repr(model), vocab_size, config.task.seq_len, config.train.trainable)
        if key not in self._counts:
            depths = (1, 2, 3)
            self._counts[key] = [count_parameters(config, vocab_size, depth) for depth in depths]
        one, two, three = self._counts[key]
        more = config.model.depth - 1
        return one + more * (two - one) + more * (more - 1) // 2 * (three - 2 * two + one)


def count_parameters(config: conf.Config, vocab_size: int, depth: int) -> int:
    """Return the number of parameters of the same stack at another depth, built without storage."""
    shallow = conf.with_overrides(config, {"model.depth": depth})
    built = build_model(shallow, vocab_size=vocab_size, device=torch.device("meta"))
    return sum(built.banks.count().values())


class Job(NamedTuple):
    """A cell as a job of another program.

    text: content of its file.
    command: for a shell, equal for all cells of a study but for the file's place.
    trains: whether the file is a configuration, which a fork server can train too.
    """

    text: str
    command: str
    trains: bool = True


@dataclass(frozen=True)
class Requirements:
    """cores: a number; memory: bytes of the host, 0 if unknown; gpu_memory: bytes of one GPU, 0
    without one.
    """

    cores: int
    memory: int
    gpu_memory: int = 0


def requirements_of(cell: Cell, *, has_gpu: bool) -> Requirements:
    """Return the requirements of a cell on a machine with or without a GPU.

    On a GPU the estimate is of the GPU's memory; the host keeps θ_0 beside the memory of torch.
    """
    device, estimate = cell.config.runtime.device, int(MARGIN * cell.memory)
    on_gpu = device == "cuda" or (device == "auto" and has_gpu)
    cores = choose_threads(cell.config, on_gpu=on_gpu)
    if on_gpu:
        return Requirements(cores, GPU_HOST_BYTES + int(MARGIN * 4 * cell.parameters), estimate)
    return Requirements(cores, estimate)


def config_yaml(cell: Cell, cores: int) -> str:
    """Return the cell's configuration as YAML, with the cores that it reserves as its threads.

    'auto' may mean all cores of the node, and then the numbers would depend on the node.
    """
    if cell.config.runtime.threads == "auto" and cores > 1:
        return conf.to_yaml(conf.with_overrides(cell.config, {"runtime.threads": cores}))
    return conf.to_yaml(cell.config)


def train_arguments(study: str, out: str | Path) -> list[str]:
    """Return the arguments after the configuration of `deepstack train` for a run of a study."""
    loaded = [word for one in plugins.LOADED.values() for word in ("--plugin", str(one.path))]
    return ["--quiet", "--out", str(out), "--study", study, *loaded]
