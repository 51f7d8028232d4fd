"""The state of a run in its checkpoints: saved, and loaded to resume or to use the run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deepstack import config as conf
from deepstack.base.errors import NothingMatchedError, ResourceError
from deepstack.model import without_defaults
from deepstack.model.build import Built, build_model
from deepstack.records import RunFolder
from deepstack.tasks import Task, task_of
from deepstack.training import checkpoint as ckpt
from deepstack.training.extension import recorded_config
from deepstack.training.optimizer import load_optimizer_state, optimizer_state

if TYPE_CHECKING:
    from deepstack.training.run import TrainingRun

# Bytes allowed for any checkpoint file besides the weights: headers, padding, small tensors.
LEAST_LIMIT = 2**26


def load_state(run: TrainingRun) -> ckpt.Checkpoint | None:
    """Load the newest whole checkpoint of a run on every rank and return it; None without one."""
    parts: dict[str, dict[str, Tensor]] = {}

    def find() -> dict[str, Any] | None:
        # Of several ranks each holds a part of the weights.
        weights = run.built.state() if run.ranks.size == 1 else None
        _, on_disk = conf.disk_estimate(run.config, run.task.vocab_size)
        size_limit = LEAST_LIMIT + on_disk + 8 * run.update.initial.numel()
        owner = ckpt.Owner(conf.digest(without_defaults(run.config)), weights, size_limit)
        checkpoint = ckpt.newest_usable(run.folder, run.observer.notify, owner)
        if checkpoint is None:
            return None
        parts.update(checkpoint.parts)
        return {"step": checkpoint.step, "state": checkpoint.state}

    facts = run.ranks.from_rank0(find)
    if facts is None:
        return None
    parts = run.ranks.broadcast(parts)
    try:
        run.built.load(parts["weights"])
        if "optimizer" in parts:  # else of the last step: only `finish` remains
            load_optimizer_state(run.optimizer, run.built.trained, parts["optimizer"])
            run.update.load(parts["probe"])
            run.snapshots.records.load(parts["layers"])
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        path = run.folder.checkpoint_path(facts["step"])
        raise ResourceError(f"{path}: cannot be gone on from: {error!r}") from error
    return ckpt.Checkpoint(parts=parts, **facts)


def save_state(run: TrainingRun, step: int) -> None:
    """Write a checkpoint with the run's digest and the sha256 of its logs.

    That of the last step has the weights only, unless runtime.keep_optimizer is set.
    """
    parts = {"weights": run.built.state()}
    if step < run.config.train.steps or run.config.runtime.keep_optimizer:
        parts["optimizer"] = optimizer_state(run.optimizer, run.built.trained)
        parts |= {"probe": run.update.state(), "layers": run.snapshots.records.state()}
    if run.ranks.is_rank0:
        logs = {log.path.stem: log.sha256 for log in run.logs.values() if log.compared}
        state = {"run": conf.digest(without_defaults(run.config)), "logs": logs}
        ckpt.save(run.folder, ckpt.Checkpoint(step, parts, state))


@dataclass(frozen=True)
class Trained:
    """A run's model at the weights of a checkpoint, with its settings and its task."""

    folder: RunFolder
    config: conf.Config
    built: Built
    step: int
    task: Task


def load_trained(folder: RunFolder, notify: Callable[[str], None]) -> Trained:
    """Load config, task and model of the newest whole checkpoint of a run.

    notify: receives a line for each checkpoint that is not used.  Raises ConfigError for a run
    of an external model, NothingMatchedError without a checkpoint.
    """
    config = recorded_config(folder)
    task = task_of(config)
    built = build_model(config, vocab_size=task.vocab_size, draw=False)
    damaged: list[str] = []
    owner = ckpt.Owner(conf.digest(without_defaults(config)), built.state(), sys.maxsize)
    newest = next(ckpt.whole_checkpoints(folder, damaged, owner), None)
    for problem in damaged:
        notify(f"not used: {problem}")
    if newest is None:
        state = folder.read_status().get("state", "interrupted")
        raise NothingMatchedError(
            f"{folder.path} has no whole checkpoint to load (its run is {state}); to train it "
            f"again: deepstack train {shlex.quote(str(folder.config_path))} --study NAME"
        )
    built.load(newest.parts["weights"])
    built.at_step(newest.step)
    return Trained(folder, config, built, newest.step, task)
