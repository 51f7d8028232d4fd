"""One training run: the main loop, and its operations on a model, an optimizer and open logs."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.base.ending import Stop, stop_requests
from deepstack.base.errors import ChangedLogError, Interrupted
from deepstack.base.gc_control import gc_paused
from deepstack.diagnostics import Culprit, ModelUpdate, culprit, evaluating
from deepstack.fast import (
    BatchSum,
    Measured,
    PassRecorder,
    enable_fast_paths,
    make_step,
    step_recorder,
)
from deepstack.model import with_defaults, with_steps
from deepstack.model.chunked_loss import ChunkedLoss
from deepstack.records import Run
from deepstack.schemes import SCHEMES
from deepstack.training import checkpoint as ckpt
from deepstack.training.environment import usual_torch_modes
from deepstack.training.evaluation import Evaluation, mean_loss, to_device
from deepstack.training.extension import Parent
from deepstack.training.meta import write_description
from deepstack.training.observer import Observer, Started, default_observer
from deepstack.training.optimizer import create_optimizer_state, make_optimizer
from deepstack.training.outcome import TRAINING_STEP, RunProgress, record_end, recorded_outcome
from deepstack.training.penalty import SpectralPenalty
from deepstack.training.preflight import (
    Prepared,
    lock_run,
    notify_ended,
    preflight,
    refuse_buffer_writes,
)
from deepstack.training.ranks import build_for_ranks, dropout_seed
from deepstack.training.recorder import (
    TOLERANCE,
    Divergence,
    Recorder,
    cause,
    mark_tolerated,
    open_logs,
    sync_logs,
)
from deepstack.training.resources import release_memory
from deepstack.training.resume import TrainingState, keep_weights, load_state, save_state
from deepstack.training.schedule import keeps_weights, learning_rate, row_is_due
from deepstack.training.snapshot_writer import SnapshotWriter


def train(
    config: conf.Config,
    *,
    study: str | None = None,
    out: str | Path = "results",
    observer: Observer | None = None,
    stop: Stop | None = None,
    allow_env_change: bool = False,
    command: str = "",
    parent: Parent | None = None,
) -> Run:
    """Train the configured run in <out>/<study>/<run> and return it.

    A finished run is not trained again.  An interrupted run resumes, and its log equals an
    uninterrupted run's.  Divergence is a result, not an error.

    config: from `deepstack.load_config`; it is never changed.
        `deepstack.config.with_overrides(config, {"model.depth": 48})` returns a changed one.
    study: name of the study's folder, by default the configuration's name or 'runs'.
    observer: receives every event; `deepstack.training.PlainLines()` prints a line every five
        seconds.  Without one, a notebook shows a progress bar; `deepstack.training.Observer()` is
        silent.
    stop: called after every step; if it returns a signal number, the run saves a checkpoint and
        ends.  Without `stop`, Ctrl-C does so after the step and raises KeyboardInterrupt.  A second
        Ctrl-C raises at once, and the next call repeats the steps after the last checkpoint.

    parent: a recorded run from which a new one begins; `deepstack.training.parent_of(run, steps)`
        returns one to extend, and `parent.config` is the config to train.

    Returns a Run: `run.steps`, `run.evals` (pandas), `run.state`, `run.path`.

    Raises errors of `deepstack.errors`: ConfigError, ResourceError (memory, disk, a folder in use),
    DifferenceError (a resumed run whose recomputed rows differ from its log) and Interrupted.
    """
    config, observer = with_steps(conf.checked_config(config)), observer or default_observer()
    with (
        usual_torch_modes(),
        lock_run(config, study, Path(out), parent=parent, stop=stop) as locked,
    ):
        if locked.has_ended:
            notify_ended(locked, observer)
            return Run(locked.path)
        with (
            preflight(
                locked,
                observer,
                allow_env_change=allow_env_change,
                command=command,
                parent=parent,
            ) as prepared,
            open_run(prepared) as run,
        ):
            run.begin()
            with stop_requests(stop) as stop_signal:
                for step in run.remaining_steps():
                    inputs, targets = run.batch(step)
                    measured = run.step(inputs, targets, run.learning_rate(step))
                    run.record(step, measured)
                    if run.recorder.divergence:
                        break
                    if run.snapshots.is_due(step):
                        run.snapshot(step)
                    if row_is_due(config, "evals", step):
                        run.evaluate(step)
                    if keeps_weights(config.train, step):
                        run.keep(step)
                    if run.checkpoint_is_due(step):
                        run.save(step)
                    if signal := run.ranks.max_over_ranks(stop_signal() or 0):
                        run.interrupt(step, signal)
                return run.finish()


@contextmanager
def open_run(prepared: Prepared, *, measures: bool = True) -> Iterator[TrainingRun]:
    """Yield the run, built and resumed; afterwards close its logs and record how it ended.

    measures: whether a step measures the model update; only timings leave it out.
    """
    with recorded_outcome(prepared) as progress, ExitStack() as resources:
        resources.callback(release_memory, prepared.device)
        with gc_paused():
            run = TrainingRun(prepared, progress, resources, measures=measures)
        resources.callback(vars(run).clear)  # a closed run holds no memory
        gc.freeze()  # the model lives until the end: exclude it from collections
        yield run


class TrainingRun:
    """A run in its locked folder, with the model, optimizer and logs that fill it.

    A new instance has loaded the newest checkpoint, if there is one.
    resources: closes the logs and frees the step's memory.
    """

    def __init__(
        self, prepared: Prepared, progress: RunProgress, resources: ExitStack, *, measures: bool
    ) -> None:
        self.prepared, self.progress = prepared, progress
        self.config, self.task, self.folder = prepared.config, prepared.task, prepared.folder
        self.device, self.ranks, self.observer = prepared.device, prepared.ranks, prepared.observer
        self.folder.write_config(conf.to_yaml(with_defaults(self.config)))
        self.of_ranks = build_for_ranks(prepared)
        self.built, self.model = self.of_ranks.built, self.of_ranks.built.model
        self.model.train(self.config.model.dropout > 0)
        passes = self._make_step(resources, measures)
        self.evaluation = Evaluation.of_run(prepared)
        self.forward = passes.forward(self.logits)
        resumed = load_state(prepared, self.state)
        if prepared.paths.executor and not resumed:
            self.update.begin(passes.forward(self.update.hidden))
        if prepared.paths.replayed:
            create_optimizer_state(self.optimizer, self.built.trained)
        progress.step = progress.resumed_from = resumed.step if resumed else 0
        self.first_step = progress.step + 1
        self._open_logs(resources, resumed)
        self._saved = time.monotonic()

    def _make_step(self, resources: ExitStack, measures: bool) -> PassRecorder:
        """Make the optimizer, the measurements and the training step; return its fast paths."""
        config, paths, notify = self.config, self.prepared.paths, self.observer.notify
        self.penalty = SpectralPenalty(config, self.built, self.ranks)
        self.count: float | None = None  # divisor of the loss of this rank's share of a batch
        in_place = paths.captured or paths.replayed
        self.optimizer = make_optimizer(config.train, self.built, capturable=in_place)
        every = paths.recompute_every
        if every and config.runtime.recompute_every == "auto":
            notify(f"memory is short: layers are computed twice (runtime.recompute_every={every})")
        enable_fast_paths(self.model, paths, notify, config)
        probe = to_device(self.task.probe_batch(config.log.probe_sequences), self.device)
        self.update = ModelUpdate(self.model, probe[0])
        passes = PassRecorder(paths, self.prepared.threads, notify)
        resources.callback(passes.release)
        self.snapshots = SnapshotWriter(self.of_ranks, probe, self.update, self.optimizer, passes)
        resources.callback(self.snapshots.close)
        self.state = TrainingState(self.built, self.optimizer, self.update, self.snapshots)
        share, norm_of = self.of_ranks.reductions()
        step = make_step(
            self.loss,
            self.built,
            self.optimizer,
            config.train,
            penalty=self.penalty.add_gradient,
            probe=self.update.measure if measures else None,
            share=share,
            norm_of=norm_of,
            capture=step_recorder(self.model, config, paths, notify, self.prepared.threads),
        )
        resources.callback(step.release)
        self.step = refuse_buffer_writes(step, self.model)
        return passes

    def _open_logs(self, resources: ExitStack, resumed: ckpt.Checkpoint | None) -> None:
        """Write meta.json and open the logs, whose rows after the checkpoint are compared."""
        snapshot_logs = self.snapshots.columns()
        meta = write_description(
            self.prepared,
            self.built,
            self.update.initial,
            self.evaluation,
            logs=snapshot_logs,
        )
        exact = self.config.runtime.deterministic and "environment_changed" not in meta
        tolerance = 0.0 if exact else TOLERANCE
        start = self.progress.step or -1
        snapshots = {name: ("step", *more) for name, more in snapshot_logs.items()}
        columns = {"evals": self.evaluation.columns, **snapshots}
        self.logs = open_logs(self.folder, columns, resources, start, tolerance)
        self.snapshots.logs = self.logs
        self.recorder = Recorder(self.logs, self.device, self.config.train.max_loss, self.observer)
        resources.callback(self.recorder.release)
        if resumed and self.ranks.is_rank0 and (names := ckpt.changed_logs(self.folder, resumed)):
            raise ChangedLogError(f"{self.folder.path / names[0]}: changed while its run resumed")

    def begin(self) -> None:
        """Notify the observer; for a new run, take the snapshot and evaluation of step 0."""
        self.folder.write_status("running", self.progress.step)
        self.observer.started(
            Started(
                folder=self.folder,
                label=SCHEMES[self.config.model.scheme].label,
                depths=[len(stack.layers) for stack in self.model.stacks.values()],
                parameters=sum(self.built.banks.count().values()),
                first_step=self.first_step,
                steps=self.config.train.steps,
                device=str(self.device),
                references=self.evaluation.references,
            )
        )
        if self.first_step == 1:
            if self.snapshots.is_due(0):
                self.snapshot(0)
            self.evaluate(0)
            if keeps_weights(self.config.train, 0):
                self.keep(0)
        self.recorder.pause()

    def remaining_steps(self) -> range:
        """Return the steps that remain, 1-based."""
        return range(self.first_step, self.config.train.steps + 1)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step on the device, and prepare the step's snapshot."""
        self.progress.begin(TRAINING_STEP)
        if self.config.model.dropout:  # a function of seed and step: nothing to save or restore
            torch.manual_seed(dropout_seed(self.config.seed, step, self.ranks.rank))
        self.built.at_step(step)
        self.snapshots.prepare(step)
        batch = self.task.train_batch(step, self.config.train.batch_size)
        part, self.count = self.of_ranks.share_of(batch)
        return to_device(part, self.device)

    def learning_rate(self, step: int) -> float:
        """Return lr(t) of the schedule."""
        return learning_rate(self.config.train, step)

    def autocast(self) -> torch.autocast:
        """Return a context for bf16 matrix products, disabled unless `train.precision` is bf16."""
        bf16 = self.config.train.precision == "bf16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bf16)

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the model's logits of a batch, with products in the precision of the training."""
        with self.autocast():
            return self.model(inputs)

    def loss(self, inputs: Tensor, targets: Tensor, count: Tensor | None = None) -> Tensor:
        """Return the mean loss of a batch, or the contribution of a part of it.

        count: predicted positions of the whole batch, of which these are a micro-batch.
        """
        divisor = count if self.count is None else self.count
        train = self.config.train
        loss = partial(mean_loss, smoothing=train.label_smoothing, z_loss=train.z_loss)
        with self.autocast(), self.model.statistics("own_and_followed"):
            if conf.chunk_rows(targets.numel(), self.task.vocab_size):
                return self.model(inputs, ChunkedLoss(loss, targets, divisor))
            logits = self.model(inputs)
        return loss(logits, targets, divisor)

    def record(self, step: int, measured: Measured) -> None:
        """Record row t of steps.csv: loss and gradient norm at θ_{t-1}, model update at θ_t."""
        self.recorder.add(step, self.learning_rate(step), measured)
        self.snapshots.follow(step, measured)
        self.progress.step = step
        if self.snapshots.is_due(step) or row_is_due(self.config, "evals", step):
            self.recorder.flush()

    def snapshot(self, step: int) -> None:
        """Take the snapshot of layers and roles and write it, without disturbing training."""
        self.progress.begin("a snapshot of the layers")
        self.snapshots.take(step)
        self.recorder.pause()

    def evaluate(self, step: int) -> None:
        """Measure the validation loss and write it as a row of evals.csv."""
        self.progress.begin("the validation")
        row = {"step": step, **self.evaluation.measure(self.model, self.forward)}
        self.logs["evals"].write(row)
        self.observer.evaluated(step, row)
        self.recorder.pause()

    def checkpoint_is_due(self, step: int) -> bool:
        """Return whether the interval has passed; `finish` saves the last step."""
        waited = time.monotonic() - self._saved >= self.config.runtime.checkpoint_seconds
        return bool(self.ranks.max_over_ranks(waited)) and step < self.config.train.steps

    def keep(self, step: int) -> None:
        """Keep the weights after this step, unless the run has diverged."""
        self.progress.begin("keeping the weights")
        self.recorder.flush()
        if not self.recorder.divergence:
            keep_weights(self.prepared, self.state, step)
        self.recorder.pause()

    def save(self, step: int) -> None:
        """Save a checkpoint after this step, unless the run has diverged."""
        self.progress.begin("saving a checkpoint")
        self.recorder.flush()
        if self.recorder.divergence:
            return
        self.snapshots.records.write()
        sync_logs(self.logs.values())
        mark_tolerated(self.folder, self.logs.values(), self.observer.notify)
        save_state(self.prepared, self.state, step, self.logs.values())
        self.folder.write_status("running", step)
        self._saved = time.monotonic()
        self.recorder.pause()

    def interrupt(self, step: int, signal: int) -> None:
        """Save a checkpoint and raise Interrupted, whose exit code is 128 + signal."""
        self.save(step)
        if self.recorder.divergence:
            return
        record_end(self.prepared, "interrupted", step)
        self.ranks.barrier()  # torchrun ends all ranks when one has exited
        raise Interrupted(f"interrupted at step {step}, saved; the same command goes on", signal)

    def finish(self) -> Run:
        """Write the pending rows, the weights of a completed run and its status; return the run."""
        self.recorder.flush()
        self.snapshots.records.write()
        logs = sync_logs(self.logs.values(), ended=True)
        mark_tolerated(self.folder, self.logs.values(), self.observer.notify)
        if divergence := self.recorder.divergence:
            origin = self._culprit(divergence) if self.ranks.size == 1 else Culprit("unknown")
            self.observer.notify(cause(divergence, origin))
            facts = divergence.facts() | {"first_bad_layer": origin.layer, "found_in": origin.where}
            record_end(self.prepared, "diverged", divergence.step, logs=logs, **facts)
            ckpt.keep_only(self.folder, -1)  # last: until then a killed run resumes
        else:
            step, runtime = self.config.train.steps, self.config.runtime
            if runtime.keep_final_weights:
                if step > 0 or runtime.keep_optimizer:  # else the seed gives the weights
                    save_state(self.prepared, self.state, step, self.logs.values())
                ckpt.keep_only(self.folder, step)  # the checksums list the remaining files
            record_end(self.prepared, "done", step, logs=logs)
            if not runtime.keep_final_weights:
                ckpt.keep_only(self.folder, -1)
        self.ranks.barrier()  # until the status is written
        return Run(self.prepared.path)

    def _culprit(self, divergence: Divergence) -> Culprit:
        """Return the first non-finite layer of the diverged step, repeated without its update."""
        if divergence.quantity == "model_update":  # measured at the parameters after that step
            with evaluating(self.model):
                return culprit(self.built, [self.snapshots.inputs], None)
        count, banks = self.config.train.parts, self.built.banks
        batch = BatchSum(self.loss, banks, count, self.device, self.penalty.add_gradient)
        parts = batch.split(*self.batch(divergence.step))

        def backward() -> Tensor:
            batch.compute(*self.batch(divergence.step))  # with the same dropout
            return batch.loss

        with self.autocast():
            return culprit(self.built, [inputs for inputs, _ in parts], backward)
