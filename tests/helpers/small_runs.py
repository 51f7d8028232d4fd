"""Trainings of seconds, and the files that must be equal when they are repeated."""

import json
import signal
from collections.abc import Callable, Mapping
from inspect import signature
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

import deepstack
from deepstack.base.errors import Interrupted
from deepstack.config import Config, Study
from deepstack.fast import Step, make_step
from deepstack.model.build import Built
from deepstack.records import CHECKSUMS, Run, RunFolder, sha256
from deepstack.sweeps import expand
from deepstack.training import make_optimizer, mean_loss
from helpers.configs import config_with

SMALL = {
    "model.depth": 4, "model.d_model": 16, "task.seq_len": 16, "train.batch_size": 4,
    "train.steps": 12, "train.eval_every": 4, "train.eval_batches": 2, "log.probe_sequences": 2,
}  # fmt: skip


def small(**changes: Any) -> Config:
    return config_with(SMALL, **changes)


def step_of(built: Built, config: Config) -> Step:
    """The plain training step of a model, (inputs, targets, lr) -> Measured."""
    optimizer = make_optimizer(config.train, built)
    return make_step(lambda x, y: mean_loss(built.model(x), y), built, optimizer, config.train)


def only_run(study: Path) -> Run:
    """The one run of a study."""
    (path,) = (path for path in study.iterdir() if path.is_dir())
    return Run(path)


def data_of(run: Run) -> dict[str, bytes]:
    """Every byte of a run that must be the same again."""
    patterns = ("steps.csv", "evals.csv", "layers/*.npy", "checkpoint/*/weights.safetensors")
    files = (file for pattern in patterns for file in run.path.glob(pattern))
    return {str(file.relative_to(run.path)): file.read_bytes() for file in files}


def logs_of(run: Run) -> dict[str, bytes]:
    """Every log of a run that must be the same again."""
    return {p.name: p.read_bytes() for p in run.path.glob("*.csv") if p.name != "timing.csv"}


def weights_of(run: Run) -> dict[str, Tensor]:
    """The weights of a run's only checkpoint."""
    (file,) = run.path.glob("checkpoint/*/weights.safetensors")
    return load_file(file)


def stop_at(step: int) -> Callable[[], int | None]:
    """A stop request that comes after so many steps of this process."""
    calls = count(1)
    return lambda: signal.SIGTERM if next(calls) >= step else None


def interrupted(config: Config, out: Path, at: int = 6, study: str = "runs") -> RunFolder:
    """The folder of the study's only run, trained until a signal after so many steps."""
    with pytest.raises(Interrupted) as caught:
        deepstack.train(config, study=study, out=out, stop=stop_at(at))
    assert caught.value.exit_code == 143
    return only_run(out / study).folder


def sweep_here(
    config: Config | Study, grid: Mapping[str, Any] | None = None, **options: Any
) -> list[Run]:
    """`deepstack.sweep` without its processes, which import torch anew."""
    signature(deepstack.sweep).bind(config, grid, **options)
    study, out = options["study"], options["out"]
    return [deepstack.train(cell, study=study, out=out) for cell in expand(config, grid)]


def reseal(folder: Path) -> None:
    """Give a checkpoint valid checksums of its present files."""
    files = (path for path in folder.iterdir() if path.is_file() and path.name != CHECKSUMS)
    (folder / CHECKSUMS).write_text(json.dumps({file.name: sha256(file) for file in files}))


def rewrite_tensors(checkpoint: Path, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> None:
    """Apply `change` to every weight and moment of a checkpoint, as an earlier version had it."""
    for file in ("weights.safetensors", "optimizer.safetensors"):
        parts = load_file(checkpoint / file)
        save_file(dict(change(key, value) for key, value in parts.items()), checkpoint / file)
    reseal(checkpoint)
