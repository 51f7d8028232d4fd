"""One training run: the main loop, and its operations on a model, an optimizer and open logs."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor

from deepstack import config as conf
from deepstack.base.ending import Stop, stop_requests
from deepstack.base.errors import ChangedLogError, Interrupted
from deepstack.base.gc_control import gc_paused
from deepstack.diagnostics import Culprit, ModelUpdate, culprit, evaluating
from deepstack.fast import (
    Measured,
    PassRecorder,
    enable_fast_paths,
    make_step,
    step_recorder,
)
from deepstack.model import with_steps
from deepstack.records import Run
from deepstack.schemes import SCHEMES
from deepstack.training import checkpoint as ckpt
from deepstack.training.buffers import refuse_buffer_writes
from deepstack.training.claim import Prepared, claim, notify_ended, prepare
from deepstack.training.environment import usual_torch_modes
from deepstack.training.evaluation import to_device
from deepstack.training.meta import write_description
from deepstack.training.objective import Objective
from deepstack.training.observer import Observer, Started, default_observer
from deepstack.training.optimizer import create_optimizer_state, make_optimizer
from deepstack.training.outcome import TRAINING_STEP, RunProgress, record_end, recorded_outcome
from deepstack.training.parts import added_gradient
from deepstack.training.parts.extension import Parent
from deepstack.training.parts.ranks import RankModel, build_for_ranks
from deepstack.training.plan import RunPart
from deepstack.training.preflight import plan_run
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
from deepstack.training.resume import TrainingState, load_state, save_state
from deepstack.training.schedule import learning_rate, row_is_due
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
        claim(plan_run(config, study, out, parent=parent, stop=stop)) as claimed,
    ):
        if claimed.has_ended:
            notify_ended(claimed, observer)
            return Run(claimed.path)
        with (
            prepare(
                claimed, observer, allow_env_change=allow_env_change, command=command
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
                    run.observe(step)
                    if run.checkpoint_is_due(step):
                        run.save(step)
                    if signal := prepared.plan.ranks.max_over_ranks(stop_signal() or 0):
                        run.interrupt(step, signal)
                return run.finish()


@contextmanager
def open_run(prepared: Prepared, *, measures: bool = True) -> Iterator[TrainingRun]:
    """Yield the run, built and resumed; afterwards close its logs and record how it ended.

    measures: whether a step measures the model update; only timings leave it out.
    """
    with recorded_outcome(prepared) as progress, ExitStack() as resources:
        resources.callback(release_memory, prepared.plan.device)
        with gc_paused():
            run = TrainingRun(prepared, progress, resources, measures=measures)
        resources.callback(vars(run).clear)  # a closed run holds no memory
        gc.freeze()  # the model lives until the end: exclude it from collections
        yield run


class TrainingRun:
    """A run in its locked folder, with the model, optimizer and logs that fill it.

    A new instance has loaded the newest checkpoint, if there is one.

    resources: closes the logs and frees the step's memory.
    state: the model, optimizer and measurements, whose values a checkpoint holds.
    step: (inputs, targets, learning rate) -> the measurements of the step.
    forward: inputs -> logits, as the evaluation computes them.
    """

    def __init__(
        self, prepared: Prepared, progress: RunProgress, resources: ExitStack, *, measures: bool
    ) -> None:
        plan = prepared.plan
        self.prepared, self.progress = prepared, progress
        prepared.folder.write_config(plan.yaml)
        model = build_for_ranks(plan)
        model.built.model.train(plan.config.model.dropout > 0)
        self.objective = Objective(model)
        passes = self._make_step(model, resources, measures)
        recorded = plan.ranks.from_rank0(prepared.folder.read_meta).get("validation", {})
        self.evaluation = plan.evaluation(recorded.get("sequences"))
        self.forward = passes.forward(self.objective.logits)
        resumed = load_state(prepared, self.state)
        update = self.state.update
        if prepared.paths.executor and not resumed:
            update.begin(passes.forward(update.hidden))
        if prepared.paths.replayed:
            create_optimizer_state(self.state.optimizer, model.built.trained)
        progress.step = progress.resumed_from = resumed.step if resumed else 0
        self._open_logs(resources, resumed)
        self._saved = time.monotonic()

    def _make_step(self, model: RankModel, resources: ExitStack, measures: bool) -> PassRecorder:
        """Make the optimizer, the measurements and the training step; return its fast paths."""
        prepared, plan, built = self.prepared, self.prepared.plan, model.built
        config, paths, notify = plan.config, prepared.paths, prepared.observer.notify
        add_gradient = added_gradient(plan, built)
        in_place = paths.captured or paths.replayed
        optimizer = make_optimizer(config.train, built, capturable=in_place)
        every = paths.recompute_every
        if every and config.runtime.recompute_every == "auto":
            notify(f"memory is short: layers are computed twice (runtime.recompute_every={every})")
        enable_fast_paths(built.model, paths, notify, config)
        probe = to_device(plan.task.probe_batch(config.log.probe_sequences), plan.device)
        update = ModelUpdate(built.model, probe[0])
        passes = PassRecorder(paths, prepared.threads, notify)
        resources.callback(passes.release)
        snapshots = SnapshotWriter(prepared.folder, model, probe, update, optimizer, passes)
        resources.callback(snapshots.close)
        self.state = TrainingState(built, optimizer, update, snapshots)
        share, norm_of = model.reductions()
        step = make_step(
            self.objective.loss,
            built,
            optimizer,
            config.train,
            penalty=add_gradient,
            probe=update.measure if measures else None,
            share=share,
            norm_of=norm_of,
            capture=step_recorder(built.model, config, paths, notify, prepared.threads),
        )
        resources.callback(step.release)
        self.step = refuse_buffer_writes(step, built.model)
        return passes

    def _open_logs(self, resources: ExitStack, resumed: ckpt.Checkpoint | None) -> None:
        """Write meta.json and open the logs, whose rows after the checkpoint are compared."""
        prepared, plan, state = self.prepared, self.prepared.plan, self.state
        snapshot_logs = state.snapshots.columns()
        meta = write_description(
            prepared, state.built, state.update.initial, self.evaluation, logs=snapshot_logs
        )
        exact = plan.config.runtime.deterministic and "environment_changed" not in meta
        tolerance = 0.0 if exact else TOLERANCE
        start = self.progress.step or -1
        snapshots = {name: ("step", *more) for name, more in snapshot_logs.items()}
        columns = {"evals": self.evaluation.columns, **snapshots}
        self.logs = open_logs(prepared.folder, columns, resources, start, tolerance)
        state.snapshots.logs = self.logs
        limit = plan.config.train.max_loss
        self.recorder = Recorder(self.logs, plan.device, limit, prepared.observer)
        resources.callback(self.recorder.release)
        if resumed and plan.ranks.is_rank0:
            if names := ckpt.changed_logs(prepared.folder, resumed):
                path = prepared.folder.path / names[0]
                raise ChangedLogError(f"{path}: changed while its run resumed")

    def begin(self) -> None:
        """Notify the observer; for a new run, take the snapshot and evaluation of step 0."""
        prepared, built, first = self.prepared, self.state.built, self.progress.step + 1
        config = prepared.plan.config
        prepared.folder.write_status("running", self.progress.step)
        prepared.observer.started(
            Started(
                folder=prepared.folder,
                label=SCHEMES[config.model.scheme].label,
                depths=[len(stack.layers) for stack in built.model.stacks.values()],
                parameters=sum(built.banks.count().values()),
                first_step=first,
                steps=config.train.steps,
                device=str(prepared.plan.device),
                references=self.evaluation.references,
            )
        )
        if first == 1:
            self.observe(0)
        self.recorder.pause()

    def remaining_steps(self) -> range:
        """Return the steps that remain, 1-based."""
        return range(self.progress.step + 1, self.prepared.plan.config.train.steps + 1)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of a step on the device, and prepare the step's snapshot."""
        self.progress.begin(TRAINING_STEP)
        self.state.snapshots.prepare(step)
        return self.objective.batch(step)

    def learning_rate(self, step: int) -> float:
        """Return lr(t) of the schedule."""
        return learning_rate(self.prepared.plan.config.train, step)

    def record(self, step: int, measured: Measured) -> None:
        """Record row t of steps.csv: loss and gradient norm at θ_{t-1}, model update at θ_t."""
        snapshots = self.state.snapshots
        self.recorder.add(step, self.learning_rate(step), measured)
        snapshots.follow(step, measured)
        self.progress.step = step
        if snapshots.is_due(step) or self._evaluation_is_due(step):
            self.recorder.flush()

    def _evaluation_is_due(self, step: int) -> bool:
        return step == 0 or row_is_due(self.prepared.plan.config, "evals", step)

    def observe(self, step: int) -> None:
        """Take the snapshot and the evaluation that are due after a step; let the parts act."""
        if self.state.snapshots.is_due(step):
            self.snapshot(step)
        if self._evaluation_is_due(step):
            self.evaluate(step)
        for part in self.prepared.plan.parts:
            if part.is_due(self.prepared.plan, step):
                self.act(part, step)

    def snapshot(self, step: int) -> None:
        """Take the snapshot of layers and roles and write it, without disturbing training."""
        self.progress.begin("a snapshot of the layers")
        self.state.snapshots.take(step)
        self.recorder.pause()

    def evaluate(self, step: int) -> None:
        """Measure the validation loss and write it as a row of evals.csv."""
        self.progress.begin("the validation")
        row = {"step": step, **self.evaluation.measure(self.state.built.model, self.forward)}
        self.logs["evals"].write(row)
        self.prepared.observer.evaluated(step, row)
        self.recorder.pause()

    def act(self, part: RunPart, step: int) -> None:
        """Let a part act after this step, unless the run has diverged."""
        self.progress.begin(part.activity)
        self.recorder.flush()
        if not self.recorder.divergence:
            weights = partial(self.state.parts, weights_only=True)
            part.act(self.prepared.plan, self.prepared.folder, step, weights)
        self.recorder.pause()

    def checkpoint_is_due(self, step: int) -> bool:
        """Return whether the interval has passed; `finish` saves the last step."""
        plan = self.prepared.plan
        waited = time.monotonic() - self._saved >= plan.config.runtime.checkpoint_seconds
        return bool(plan.ranks.max_over_ranks(waited)) and step < plan.config.train.steps

    def save(self, step: int) -> None:
        """Save a checkpoint after this step, unless the run has diverged."""
        self.progress.begin("saving a checkpoint")
        self.recorder.flush()
        if self.recorder.divergence:
            return
        self._sync_logs()
        save_state(self.prepared, self.state, step, self.logs.values())
        self.prepared.folder.write_status("running", step)
        self._saved = time.monotonic()
        self.recorder.pause()

    def _sync_logs(self, *, ended: bool = False) -> dict[str, str]:
        """Write the records of layers, sync the logs and return their sha256 by name."""
        self.state.snapshots.records.write()
        sums = sync_logs(self.logs.values(), ended=ended)
        mark_tolerated(self.prepared.folder, self.logs.values(), self.prepared.observer.notify)
        return sums

    def interrupt(self, step: int, signal: int) -> None:
        """Save a checkpoint and raise Interrupted, whose exit code is 128 + signal."""
        self.save(step)
        if self.recorder.divergence:
            return
        record_end(self.prepared, "interrupted", step)
        self.prepared.plan.ranks.barrier()  # torchrun ends all ranks when one has exited
        raise Interrupted(f"interrupted at step {step}, saved; the same command goes on", signal)

    def finish(self) -> Run:
        """Write the pending rows, the weights of a completed run and its status; return the run."""
        prepared, folder, config = self.prepared, self.prepared.folder, self.prepared.plan.config
        ranks = prepared.plan.ranks
        self.recorder.flush()
        logs = self._sync_logs(ended=True)
        if divergence := self.recorder.divergence:
            origin = self._culprit(divergence) if ranks.size == 1 else Culprit("unknown")
            prepared.observer.notify(cause(divergence, origin))
            facts = divergence.facts() | {"first_bad_layer": origin.layer, "found_in": origin.where}
            record_end(prepared, "diverged", divergence.step, logs=logs, **facts)
            ckpt.keep_only(folder, -1)  # last: until then a killed run resumes
        else:
            step, runtime = config.train.steps, config.runtime
            if runtime.keep_final_weights:
                if step > 0 or runtime.keep_optimizer:  # else the seed gives the weights
                    save_state(prepared, self.state, step, self.logs.values())
                ckpt.keep_only(folder, step)  # the checksums list the remaining files
            record_end(prepared, "done", step, logs=logs)
            if not runtime.keep_final_weights:
                ckpt.keep_only(folder, -1)
        ranks.barrier()  # until the status is written
        return Run(prepared.path)

    def _culprit(self, divergence: Divergence) -> Culprit:
        """Return the first non-finite layer of the diverged step."""
        built = self.state.built
        if divergence.quantity == "model_update":  # measured at the parameters after that step
            with evaluating(built.model):
                return culprit(built, [self.state.snapshots.inputs], None)
        self.progress.begin(TRAINING_STEP)
        return self.objective.culprit(divergence.step, added_gradient(self.prepared.plan, built))
