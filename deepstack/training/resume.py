"""The state of a run in its checkpoints: saved, and loaded to resume or to use the run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.base.errors import NothingMatchedError, ResourceError
from deepstack.diagnostics import ModelUpdate
from deepstack.model import without_defaults
from deepstack.model.build import Built, build_model
from deepstack.records import AppendLog, RunFolder, data_identity
from deepstack.tasks import Task, task_of
from deepstack.training import checkpoint as ckpt
from deepstack.training.claim import Prepared
from deepstack.training.optimizer import load_optimizer_state, optimizer_state
from deepstack.training.parts.extension import recorded_config
from deepstack.training.snapshot_writer import SnapshotWriter

# Bytes allowed for any checkpoint file besides the weights: headers, padding, small tensors.
LEAST_LIMIT = 2**26


@dataclass(frozen=True)
class TrainingState:
    """The parts of a run whose values a checkpoint holds.

    update: holds F_0 and F_{t-1} of the probe batch.
    snapshots: holds the records of every layer, and the last steps if it looks for spikes.
    """

    built: Built
    optimizer: torch.optim.Optimizer
    update: ModelUpdate
    snapshots: SnapshotWriter

    def parts(self, *, weights_only: bool) -> dict[str, dict[str, Tensor]]:
        """Return the parts of a checkpoint: name -> tensors by name."""
        weights = {"weights": self.built.state()}
        if weights_only:
            return weights
        spikes = self.snapshots.spikes
        return weights | {
            "optimizer": optimizer_state(self.optimizer, self.built.trained),
            "probe": self.update.state(),
            "layers": self.snapshots.records.state(),
            **({"spikes": spikes.state()} if spikes else {}),
        }

    def load(self, parts: dict[str, dict[str, Tensor]]) -> None:
        """Load what `parts` returned; raises KeyError, … for parts of another run."""
        self.built.load(parts["weights"])
        if "optimizer" in parts:  # else of the last step: only `finish` remains
            load_optimizer_state(self.optimizer, self.built.trained, parts["optimizer"])
            self.update.load(parts["probe"])
            self.snapshots.records.load(parts["layers"])
            if self.snapshots.spikes:
                self.snapshots.spikes.load(parts["spikes"])


def load_state(prepared: Prepared, state: TrainingState) -> ckpt.Checkpoint | None:
    """Load the newest whole checkpoint of a run on every rank and return it; None without one."""
    plan, folder, ranks = prepared.plan, prepared.folder, prepared.plan.ranks
    parts: dict[str, dict[str, Tensor]] = {}

    def find() -> dict[str, Any] | None:
        # Of several ranks each holds a part of the weights.
        weights = state.built.state() if ranks.size == 1 else None
        _, on_disk = plan.disk
        size_limit = LEAST_LIMIT + on_disk + 8 * state.update.initial.numel()
        owner = ckpt.Owner(plan.digest, weights, size_limit)
        checkpoint = ckpt.newest_usable(folder, prepared.observer.notify, owner)
        if checkpoint is None:
            return None
        parts.update(checkpoint.parts)
        return {"step": checkpoint.step, "state": checkpoint.state}

    facts = ranks.from_rank0(find)
    if facts is None:
        return None
    parts = ranks.broadcast(parts)
    try:
        state.load(parts)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        path = folder.checkpoint_path(facts["step"])
        raise ResourceError(f"{path}: cannot be gone on from: {error!r}") from error
    return ckpt.Checkpoint(parts=parts, **facts)


def save_state(
    prepared: Prepared, state: TrainingState, step: int, logs: Iterable[AppendLog]
) -> None:
    """Write a checkpoint with the run's digest and the sha256 of its logs.

    The checkpoint of the last step has the weights only, unless runtime.keep_optimizer is set.
    """
    plan = prepared.plan
    is_last = step >= plan.config.train.steps
    parts = state.parts(weights_only=is_last and not plan.config.runtime.keep_optimizer)
    if plan.ranks.is_rank0:
        sums = {log.path.stem: log.sha256 for log in logs if log.compared}
        facts = {"run": plan.digest, "logs": sums}
        ckpt.save(prepared.folder, ckpt.Checkpoint(step, parts, facts))


@dataclass(frozen=True)
class Trained:
    """A run's model at saved weights, with its settings and its task.

    path: the folder of the weights.
    """

    folder: RunFolder
    path: Path
    config: conf.Config
    built: Built
    step: int
    task: Task


def load_trained(
    folder: RunFolder, notify: Callable[[str], None], step: int | None = None
) -> Trained:
    """Load config, task and model of the newest whole checkpoint of a run, or of a kept step.

    notify: receives a line for each checkpoint that is not used.

    Raises ConfigError for a run of an external model, NothingMatchedError without a checkpoint or
    for a step that was not kept, ResourceError for kept weights that are damaged.
    """
    config = recorded_config(folder)
    task = task_of(config)
    built = build_model(config, vocab_size=task.vocab_size, draw=False)
    damaged: list[str] = []
    recorded = folder.read_meta().get("data", task.data)
    if data_identity(recorded) != data_identity(task.data):
        notify(
            f"{folder.path}: the text, or the part of it that is held out, differs from the run's: "
            "held-out sequences may be of its training text"
        )
    owner = ckpt.Owner(conf.digest(without_defaults(config)), built.state(), sys.maxsize)
    if step is not None:
        path = kept_weights(folder, step)
        try:
            kept = ckpt.load(path, step, owner)
        except ValueError as error:
            raise ResourceError(f"{path}: {error}") from error
        return loaded(folder, path, kept, config, built, task)
    newest = next(ckpt.whole_checkpoints(folder, damaged, owner), None)
    for problem in damaged:
        notify(f"not used: {problem}")
    if newest is None:
        raise NothingMatchedError(missing_weights(folder))
    return loaded(folder, folder.checkpoint_path(newest.step), newest, config, built, task)


def missing_weights(folder: RunFolder) -> str:
    """Return why a run has no weights to load, and the command that trains it with weights."""
    state = folder.read_status().get("state", "interrupted")
    config = conf.load_config(folder.config_path)
    changes, why = [], f"has no whole checkpoint to load (its run is {state})"
    if config.train.steps == 0:
        changes, why = ["train.steps=100"], "made no steps, after which weights are kept"
    elif state == "diverged":
        changes = ["train.keep_weights=log"]
        why = "has diverged; weights from before can be kept"
    if not config.runtime.keep_final_weights and state != "diverged":
        changes.append("runtime.keep_final_weights=true")
        if state == "done" and config.train.steps:
            why = "kept no weights (runtime.keep_final_weights=false)"
    again = " ".join(["deepstack train", shlex.quote(str(folder.config_path)), *changes])
    return f"{folder.path} {why}; to train it again: {again} --study NAME"


def loaded(
    folder: RunFolder,
    path: Path,
    checkpoint: ckpt.Checkpoint,
    config: conf.Config,
    built: Built,
    task: Task,
) -> Trained:
    """Return the model with the weights of a checkpoint."""
    built.load(checkpoint.parts["weights"])
    built.at_step(checkpoint.step)
    return Trained(folder, path, config, built, checkpoint.step, task)


def kept_weights(folder: RunFolder, step: int) -> Path:
    """Return the folder with the weights of a step; raise NothingMatchedError if there is none."""
    if step in folder.kept_steps():
        return folder.kept_path(step)
    if step in folder.checkpoints():
        return folder.checkpoint_path(step)
    if not (folder.kept_steps() or folder.checkpoints()):
        raise NothingMatchedError(missing_weights(folder))
    steps = ", ".join(map(str, sorted({*folder.kept_steps(), *folder.checkpoints()})))
    raise NothingMatchedError(
        f"{folder.path} has no weights of step {step}; kept: {steps} "
        f"(train.keep_weights keeps more)"
    )
