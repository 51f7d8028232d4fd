"""The job of training one run: the main loop's operations, built from a configuration."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.diagnostics import Culprit, ModelUpdate, culprit, evaluating
from deepstack.distributed import Processes
from deepstack.errors import ChangedLogError, Interrupted, ResourceError
from deepstack.fast import (
    CapturedFunction,
    Made,
    Measured,
    Probe,
    Step,
    Update,
    capture,
    enable_fast_paths,
    fast_paths_of,
    in_parts,
    make_step,
    makes_kernels,
    probed,
    replaying,
)
from deepstack.model import with_defaults, without_defaults
from deepstack.records import AppendLog, Run, RunFolder, write_end
from deepstack.schemes import SCHEMES
from deepstack.tasks import Task
from deepstack.training import checkpoint as ckpt
from deepstack.training.buffer_writes import refuse_buffer_writes
from deepstack.training.evaluation import Evaluation, mean_loss, to_device
from deepstack.training.intervals import evaluation_steps
from deepstack.training.meta import columns_of, meta_of, refuse_other_environment, resolution_notice
from deepstack.training.observer import Observer, Started
from deepstack.training.optimizer import load_optimizer_state, make_optimizer, optimizer_state
from deepstack.training.penalty import SpectralPenalty
from deepstack.training.ranks import (
    build_together,
    common_checkpoint,
    dropout_seed,
    reductions,
    share_of,
)
from deepstack.training.recorder import Divergence, Recorder, cause
from deepstack.training.schedule import learning_rate
from deepstack.training.snapshot_writer import SnapshotWriter

# Without deterministic kernels a replayed row may differ by rounding that training has amplified.
TOLERANCE = 1e-2
# Bytes allowed for any checkpoint file besides the weights: headers, padding, small tensors.
LEAST_LIMIT = 2**26


class Job:
    """A run folder locked by this process, with the model, optimizer and logs that fill it."""

    def __init__(
        self,
        config: conf.Config,
        folder: RunFolder,
        task: Task,
        device: torch.device,
        observer: Observer,
        processes: Processes,
    ) -> None:
        self.config, self.folder, self.task, self.device = config, folder, task, device
        self.observer, self.processes = observer, processes
        self.finished = False
        self.first_step = 1
        self.last_step = 0
        self.phase = "building the model"  # written to status.json when memory runs out
        self._saved = time.monotonic()

    def build(self, environment: dict[str, Any], command: str, allow_env_change: bool) -> None:
        """Build model, optimizer, probe and logs, and load the newest checkpoint, if any."""
        config, train = self.config, self.config.train
        ways = self.ways = fast_paths_of(config, self.device, self.processes)
        self.built = build_together(config, self.task, self.device, self.processes)
        self.model = self.built.model
        self.penalised = SpectralPenalty(config, self.built, self.processes)
        self.model.train(config.model.dropout > 0)
        enable_fast_paths(self.model, ways, config.runtime.recompute_every, self.observer.said)
        if ways.fused and self.device.type == "cuda" and makes_kernels():
            self.observer.said("Triton makes kernels; seconds, once on a machine")
        self.optimizer = make_optimizer(
            train,
            self.built.trained,
            optim=self.built.optim,
            capturable=ways.captured or ways.replayed,
        )
        on_device = to_device(self.task.probe_batch(config.log.probe_sequences), self.device)
        self.update = ModelUpdate(self.model, on_device[0])
        about = config, self.folder, self.built, on_device, self.processes, self.update
        again = partial(CapturedFunction, said=self.observer.said)
        # a failed capture changes the random generator of dropout
        self.snapshots = SnapshotWriter(
            *about, again if ways.captured and not config.model.dropout else None
        )
        self.step = self.make_step(self.update.measure)
        self.evaluation = Evaluation(self.task, train, self.device)
        self.evaluation_steps = evaluation_steps(train.eval_every, train.steps)
        before = self.folder.read_meta()
        resumed = self._resume(before, environment, allow_env_change)
        self.folder.write_config(conf.to_yaml(with_defaults(config)))
        meta = meta_of(before, config, self.task, self.built.banks.count(), environment, command)
        self.folder.write_meta(meta)
        columns = columns_of(config, self.built, self.task, self.update, self.snapshots.columns())
        self.folder.write_columns(columns)
        if not before and (notice := resolution_notice(columns)):
            self.observer.said(notice)
        exact = config.runtime.deterministic and "environment_changed" not in meta
        tolerance = 0.0 if exact else TOLERANCE
        start = self.first_step - 1 if self.first_step > 1 else -1
        evals = self.folder.log("evals", self.evaluation.columns, tolerance=tolerance)
        self.evals = evals.open(start)
        self.snapshots.open(start, tolerance)
        self.recorder = Recorder(
            self.folder, start, self.device, train.max_loss, self.observer, tolerance
        )
        if resumed and self.processes.first and (names := ckpt.changed_logs(self.folder, resumed)):
            raise ChangedLogError(f"{self.folder.path / names[0]}: changed while its run resumed")

    def make_step(self, probe: Callable[[], dict[str, Tensor]] | None) -> Step:
        """Return the training step on the chosen fast path, followed by the measurement `probe`."""
        share, norm_of = reductions(self.built, self.processes)
        step = make_step(
            self.loss,
            self.built.banks,
            self.built.trained,
            self.optimizer,
            clip=self.config.train.clip,
            max_loss=self.config.train.max_loss,
            alive=torch.ones((), device=self.device),
            probe=probe,
            share=share,
            norm_of=norm_of,
            project=self.built.projection(),
            capture=self._recorded(),
        )
        return refuse_buffer_writes(step, self.model)

    def _recorded(self) -> Callable[[Update, Probe | None], Made]:
        """Return the function that records a step: CUDA graph capture, replay, or neither."""
        if not (self.ways.captured or self.ways.replayed):
            return probed
        if self.ways.replayed:
            return partial(
                replaying,
                said=self.observer.said,
                joint=not self.model.schemes[0].changes_by_step,
            )
        return partial(
            capture,
            said=self.observer.said,
            insist=self.config.runtime.cuda_graph is True,
            joint=not self.model.schemes[0].changes_by_step,
            parts=partial(in_parts, self.model),
        )

    def _resume(
        self, before: dict[str, Any], environment: dict[str, Any], allow_env_change: bool
    ) -> ckpt.Checkpoint | None:
        """Load and return the newest whole checkpoint of a run whose meta.json was `before`."""

        def find() -> ckpt.Checkpoint | None:
            if not allow_env_change:
                refuse_other_environment(before.get("environment", environment), environment)
            return ckpt.fitting(self.folder, self.observer.said, self._owner())

        if (found := common_checkpoint(self.processes, find)) is None:
            return None
        try:
            self._load(found)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            path = self.folder.checkpoint_path(found.step)
            raise ResourceError(f"{path}: cannot be gone on from: {error!r}") from error
        return found

    def _load(self, found: ckpt.Checkpoint) -> None:
        self.built.load(found.parts["weights"])
        self.first_step = found.step + 1
        self.last_step = found.step
        if "optimizer" not in found.parts:  # a checkpoint of the last step: only `finish` remains
            return
        load_optimizer_state(self.optimizer, self.built.trained, found.parts["optimizer"])
        self.update.load(found.parts["probe"])
        self.snapshots.load(found.parts["layers"])

    def _owner(self) -> ckpt.Owner:
        """Return the properties that identify this run's checkpoints."""
        alone = self.processes.size == 1  # else each rank holds a part of the weights
        weights = 4 * sum(self.built.banks.count().values())
        return ckpt.Owner(
            run=conf.digest(without_defaults(self.config)),
            weights=self.built.state() if alone else None,
            largest=LEAST_LIMIT
            + 2 * weights
            + 8 * self.update.initial.numel()
            + self.snapshots.largest_records(),
        )

    def begin(self) -> None:
        """Notify the observer; for a new run, take the snapshot and evaluation of step 0."""
        self.folder.write_status("running", self.last_step)
        self.observer.started(
            Started(
                folder=self.folder,
                label=SCHEMES[self.config.model.scheme].label,
                depths=[len(stack.layers) for stack in self.model.stacks.values()],
                parameters=sum(self.built.banks.count().values()),
                first_step=self.first_step,
                steps=self.config.train.steps,
                device=str(self.device),
                references=self.task.references,
                unrelated=2**0.5 * float(self.update.initial.norm(dim=-1).mean()),
            )
        )
        if self.first_step == 1:
            if self.snapshot_is_due(0):
                self.snapshot(0)
            self.evaluate(0)
        self.recorder.pause()

    def remaining_steps(self) -> range:
        """Return the steps that remain, 1-based."""
        return range(self.first_step, self.config.train.steps + 1)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step on the device, and prepare the step's snapshot."""
        self.phase = "the training step"
        if self.config.model.dropout:  # a function of seed and step: nothing to save or restore
            torch.manual_seed(dropout_seed(self.config.seed, step, self.processes.rank))
        self.built.at_step(step)
        self.snapshots.prepare(step)
        batch = self.task.train_batch(step, self.config.train.batch_size)
        part, self._count = share_of(batch, self.built, self.processes)
        return to_device(part, self.device)

    def learning_rate(self, step: int) -> float:
        """Return lr(t) of the schedule."""
        return learning_rate(self.config.train, step)

    def autocast(self) -> torch.autocast:
        """Return a context for bf16 matrix products, disabled unless `train.precision` is bf16."""
        bf16 = self.config.train.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, or the contribution of this rank's share to it."""
        with self.autocast(), self.model.statistics("own_and_followed"):
            logits = self.model(inputs)
        return self.penalised(mean_loss(logits, targets, self._count))

    def record(self, step: int, measured: Measured) -> None:
        """Record row t of steps.csv: loss and gradient norm at θ_{t-1}, model update at θ_t."""
        self.recorder.add(step, self.learning_rate(step), measured)
        self.last_step = step
        if self.snapshot_is_due(step) or step in self.evaluation_steps:
            self.recorder.flush()

    def diverged(self) -> bool:
        """Return whether a row already written is non-finite or exceeds `train.max_loss`."""
        return self.recorder.divergence is not None

    def snapshot_is_due(self, step: int) -> bool:
        """Return whether a snapshot of layers or roles is due after this step."""
        return self.snapshots.is_due(step)

    def snapshot(self, step: int) -> None:
        """Take the snapshot of layers and roles and write it, without disturbing training."""
        self.phase = "a look at the layers"
        self.snapshots.take(step)
        self.recorder.pause()

    def evaluate(self, step: int) -> None:
        """Measure the validation loss and write it as a row of evals.csv."""
        self.phase = "the validation"
        row = {"step": step, **self.evaluation.measure(self.model, self.autocast)}
        self.evals.write(row)
        self.observer.evaluated(step, row)
        self.recorder.pause()

    def checkpoint_is_due(self, step: int) -> bool:
        """Return whether the interval has passed; `finish` saves the last step."""
        waited = time.monotonic() - self._saved >= self.config.runtime.checkpoint_seconds
        return bool(self.processes.largest(waited)) and step < self.config.train.steps

    def save(self, step: int) -> None:
        """Save a checkpoint after this step, unless the run has diverged."""
        self.phase = "saving a checkpoint"
        self.recorder.flush()
        if self.diverged():
            return
        self.snapshots.write()
        self._check_logs()
        parts = {
            "weights": self.built.state(),
            "optimizer": optimizer_state(self.optimizer, self.built.trained),
            "probe": self.update.state(),
            "layers": self.snapshots.records(),
        }
        if self.processes.first:
            ckpt.save(self.folder, ckpt.Checkpoint(step, parts, self._state()))
        self.folder.write_status("running", step)
        self._saved = time.monotonic()
        self.recorder.pause()

    def _state(self) -> dict[str, Any]:
        """Return a checkpoint's values besides tensors: its run and the sha256 of the logs."""
        logs = {log.path.stem: log.sha256 for log in self._logs() if log.compared}
        return {"run": conf.digest(without_defaults(self.config)), "logs": logs}

    def _logs(self) -> list[AppendLog]:
        return [*self.recorder.logs, self.evals, *self.snapshots.logs]

    def _check_logs(self, ended: bool = False) -> None:
        """Sync the logs; raise ChangedLogError if one differs from the rows written."""
        for log in self._logs():
            log.flush()
            log.check(ended=ended)

    def agreed(self, signal: int | None) -> int:
        """Return the signal that this or another rank received, or 0."""
        return self.processes.largest(signal or 0)

    def interrupt(self, step: int, signal: int) -> None:
        """Save a checkpoint and raise Interrupted, whose exit code is 128 + signal."""
        self.save(step)
        if self.diverged():
            return
        self.folder.write_status("interrupted", step)
        self.observer.finished("interrupted", step)
        self.processes.wait()  # torchrun ends all ranks when one has exited
        raise Interrupted(f"interrupted at step {step}, saved; the same command goes on", signal)

    def finish(self) -> Run:
        """Write the pending rows, the weights of a completed run and its status; return the run."""
        self.recorder.flush()
        self.snapshots.write()
        self._check_logs(ended=True)
        found = self.recorder.divergence
        logs = {log.path.name: log.sha256 for log in self._logs()}
        if found is None:
            step = self.config.train.steps
            weights = {"weights": self.built.state()}
            if self.processes.first:
                ckpt.save(self.folder, ckpt.Checkpoint(step, weights, self._state()))
                ckpt.keep_only(self.folder, step)
                write_end(self.folder, "done", step, logs=logs)
        else:
            step = found.step
            place = self._culprit(found) if self.processes.size == 1 else Culprit("unknown")
            about: dict[str, Any] = {"quantity": found.quantity, "value": repr(found.value)}
            about |= {"first_bad_layer": place.layer, "found_in": place.where}
            if self.processes.first:
                write_end(self.folder, "diverged", step, checkpoints=False, logs=logs, **about)
                ckpt.keep_only(self.folder, -1)
            self.observer.said(cause(found, place))
        self.observer.finished("done" if found is None else "diverged", step)
        self.processes.wait()  # until the status is written
        return self.result()

    def _culprit(self, found: Divergence) -> Culprit:
        """Return the first non-finite layer of the diverged step, repeated without its update."""
        if found.quantity == "model_update":  # measured at the parameters after that step
            with evaluating(self.model):
                return culprit(self.model, self.built.trained, self.snapshots.inputs, None)
        inputs, _ = self.batch(found.step)

        def backward() -> Tensor:
            self.built.banks.zero_gradients()
            loss = self.loss(*self.batch(found.step))  # with the same dropout
            loss.backward()
            return loss.detach()

        with self.autocast():
            return culprit(self.model, self.built.trained, inputs, backward)

    def result(self) -> Run:
        """Return the run as read from its folder."""
        return Run(self.folder.path)

    def close(self) -> None:
        """Close the logs that were opened."""
        for name in ("recorder", "evals", "snapshots"):
            if hasattr(self, name):
                getattr(self, name).close()
