"""The state of a run in its checkpoints: saved, and loaded to resume or to use the run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.diagnostics import ModelUpdate
from deepstack.errors import NothingMatchedError, ResourceError
from deepstack.model import without_defaults
from deepstack.model.build import Built, build_model
from deepstack.plugins import require_plugins
from deepstack.records import AppendLog, RunFolder
from deepstack.tasks import Task, task_of
from deepstack.training import checkpoint as ckpt
from deepstack.training.optimizer import load_optimizer_state, optimizer_state
from deepstack.training.preflight import Prepared, refuse_probed
from deepstack.training.snapshot_writer import LayerRecords

# Bytes allowed for any checkpoint file besides the weights: headers, padding, small tensors.
LEAST_LIMIT = 2**26


class SavedState:
    """Saves and loads the weights, the optimizer, F_0 and F_{t−1}, and the snapshots so far."""

    def __init__(
        self,
        prepared: Prepared,
        built: Built,
        optimizer: torch.optim.Optimizer,
        update: ModelUpdate,
        records: LayerRecords,
    ) -> None:
        self.folder, self.ranks = prepared.folder, prepared.ranks
        self.built, self.optimizer = built, optimizer
        self.update, self.records = update, records
        self.run = conf.digest(without_defaults(prepared.config))
        _, on_disk = conf.disk_estimate(prepared.config, prepared.task.vocab_size)
        self.largest = LEAST_LIMIT + on_disk + 8 * update.initial.numel()
        self.notify = prepared.observer.notify

    def load(self) -> ckpt.Checkpoint | None:
        """Load the newest whole checkpoint on every rank and return it; None without one."""
        parts: dict[str, dict[str, Tensor]] = {}

        def find() -> dict[str, Any] | None:
            # Of several ranks each holds a part of the weights.
            weights = self.built.state() if self.ranks.size == 1 else None
            owner = ckpt.Owner(self.run, weights, self.largest)
            checkpoint = ckpt.fitting(self.folder, self.notify, owner)
            if checkpoint is None:
                return None
            parts.update(checkpoint.parts)
            return {"step": checkpoint.step, "state": checkpoint.state}

        facts = self.ranks.from_rank0(find)
        if facts is None:
            return None
        parts = self.ranks.broadcast(parts)
        try:
            self.built.load(parts["weights"])
            if "optimizer" in parts:  # else of the last step: only `finish` remains
                load_optimizer_state(self.optimizer, self.built.trained, parts["optimizer"])
                self.update.load(parts["probe"])
                self.records.load(parts["layers"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            path = self.folder.checkpoint_path(facts["step"])
            raise ResourceError(f"{path}: cannot be gone on from: {error!r}") from error
        return ckpt.Checkpoint(parts=parts, **facts)

    def save(self, step: int, logs: Sequence[AppendLog], *, only_weights: bool = False) -> None:
        """Write a checkpoint with the run's digest and the sha256 of the logs.

        only_weights: whether no further step will follow.
        """
        parts = {"weights": self.built.state()}
        if not only_weights:
            parts["optimizer"] = optimizer_state(self.optimizer, self.built.trained)
            parts |= {"probe": self.update.state(), "layers": self.records.state()}
        if self.ranks.is_rank0:
            sums = {log.path.stem: log.sha256 for log in logs if log.compared}
            ckpt.save(self.folder, ckpt.Checkpoint(step, parts, {"run": self.run, "logs": sums}))


@dataclass(frozen=True)
class Trained:
    """A run's model at the weights of a checkpoint, with its settings and its task."""

    folder: RunFolder
    config: conf.Config
    built: Built
    step: int
    task: Task


def load_trained(folder: RunFolder, say: Callable[[str], None] = lambda _: None) -> Trained:
    """Load config, task and model of the newest whole checkpoint of a run.

    say: receives a line for each checkpoint that is not used.  Raises ConfigError for a run
    of an external model, NothingMatchedError without a checkpoint.
    """
    refuse_probed(folder)
    require_plugins(folder.read_meta().get("plugins", []), str(folder.path))
    config = conf.load_config(folder.config_path, [])
    task = task_of(config)
    built = build_model(config, vocab_size=task.vocab_size, draw=False)
    damaged: list[str] = []
    owner = ckpt.Owner(conf.digest(without_defaults(config)), built.state(), sys.maxsize)
    newest = next(ckpt.whole_checkpoints(folder, damaged, owner), None)
    for problem in damaged:
        say(f"not used: {problem}")
    if newest is None:
        state = folder.read_status().get("state", "interrupted")
        raise NothingMatchedError(
            f"{folder.path} has no whole checkpoint to load (its run is {state}); "
            "a run that is done keeps its weights, a diverged one has none"
        )
    built.load(newest.parts["weights"])
    built.at_step(newest.step)
    return Trained(folder, config, built, newest.step, task)
