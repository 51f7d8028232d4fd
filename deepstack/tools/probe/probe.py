"""`deepstack.probe`: the measurements of a run for an external model and training loop."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from deepstack.base import ConfigError
from deepstack.diagnostics import SpikeFinder, model_update
from deepstack.fast import Measured
from deepstack.model import Layers
from deepstack.records import Run, RunFolder
from deepstack.runs import SPIKES_LOG
from deepstack.tools.probe.description import (
    columns_of,
    config_of,
    environment_of,
    meta_of,
)
from deepstack.tools.probe.groups import Groups, names_by_child, names_by_group
from deepstack.tools.probe.model import (
    ExternalModel,
    Hidden,
    as_float,
    norm_of,
    on_device_of,
)
from deepstack.tools.probe.order import StepOrder
from deepstack.tools.probe.processes import processes_of
from deepstack.tools.probe.writer import Writer, number
from deepstack.training import is_due

Interval = int | Literal["log"]


class Probe:
    """Measure ‖ΔF‖ = mean over probe tokens of ‖F_t − F_0‖₂, and its parts, for any PyTorch model.

    A context around a training loop.  It writes a run folder that `deepstack plot` and
    `deepstack ls` read:

        with deepstack.probe(model, batch, optimizer, out="results/mine/run1") as probe:
            for step in range(steps):
                optimizer.zero_grad()
                loss = ...
                loss.backward()
                optimizer.step()
                probe.step(loss)

    Training is the same with it and without it, bit for bit: after each pass it puts back all that
    the modules hold.  To go on after a kill, keep `probe.state_dict()` in your checkpoint, and
    before the context give it to `probe.load_state_dict`; `probe.at` is then the last step.

    Each process of a loop may have a probe, and process 0 writes.  A model that fully_shard cuts
    over processes needs one in each of them, whose values are those of the whole model.

    batch: the fixed probe batch, on the model's device: a tensor is passed as model(batch), a tuple
        or list as model(*batch), a mapping as model(**batch).
    out: the run's folder, <study>/<run>; all runs of a study share the folder <study>.
    hidden: the source of F, the last hidden state, (…, d): the name of a module, for its output; a
        function of model and batch; by default the model's output (its `last_hidden_state` if it
        has one).  Logits are refused where there are layers, whose width they lack.  Every position
        counts, including padding.
    layers: the name of the layers' container, or a list of layers; by default the longest
        ModuleList whose members pass on a stream as wide as F; () for no values by layer.
    groups: name -> patterns of parameter names ("*.self_attn.*"); by default one group for each
        child of a layer and of the model.
    every: steps between two rows of steps.csv (the first step always has one).  A row takes one
        forward pass, or two if `every` is not 1.
    layers_every, attribution_every: steps between snapshots of every layer, and between
        attributions; 'log': 0, 1, 2, 3, 5, 8, …; 0: never.  An attribution takes a forward pass per
        group and a copy of all parameters.
    layers_on: 'spike': besides, a snapshot at a step whose loss or gradient norm jumps, and a row
        in spikes.csv with the layer that moved first (`deepstack.diagnostics.spikes` has the rule).
        Each step then copies the layers' parameters and waits for a GPU.
    name: the model's name in charts (default: its class).
    seed: of the run; charts average over it.
    config: other settings of the run, which may vary within a study, by dotted key: {"task.name":
        "copy", "model.d_ff": 256}.

    Raises ConfigError, with a remedy, for a model or batch that it cannot read, for random numbers
    in evaluation mode, and if `out` already holds a run that it is not to go on with.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        optimizer: torch.optim.Optimizer,
        *,
        out: str | Path,
        hidden: Hidden = None,
        layers: Layers = None,
        groups: Groups | None = None,
        every: int = 1,
        layers_every: Interval = "log",
        attribution_every: Interval = "log",
        layers_on: Literal["spike"] | None = None,
        name: str | None = None,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        intervals = {"layers_every": layers_every, "attribution_every": attribution_every}
        refuse_intervals(every, intervals)
        if layers_on not in (None, "spike") or (layers_on and not layers_every):
            found = f"{layers_on!r} with layers_every={layers_every!r}"
            raise ConfigError(f"layers_on: found {found}; allowed None, or 'spike' with snapshots")
        if not hasattr(optimizer, "param_groups"):
            found = type(optimizer).__name__
            raise ConfigError(
                f"optimizer: found {found}; allowed the one that makes the steps; of several, give "
                "the one with most parameters: its name and learning rate are logged"
            )
        self.model, self.optimizer, self.folder = model, optimizer, RunFolder(out)
        self.every, self.seed = every, seed
        self.layers_every, self.attribution_every = layers_every, attribution_every
        self.subject = ExternalModel(model, batch, hidden, layers)
        if layers_on and not self.subject.layers:
            raise ConfigError("layers_on: found 'spike' with layers=(); allowed with layers")
        self.groups = (
            names_by_child(self.subject)
            if groups is None
            else names_by_group(list(self.subject.parameters), groups)
        )
        self.name = name or type(self.subject.model).__name__
        known: dict[str, Any] = {"seed": seed, "log.every": every}
        known |= {f"log.{key}": interval for key, interval in intervals.items()}
        known |= {"log.layers_on": layers_on} if layers_on else {}
        self.config = config_of(self.subject, optimizer, self.name, {**known, **(config or {})})
        self.processes = processes_of(model, self.subject.initial.device)
        self.at = 0  # the number of the last step
        self._last_F = self.subject.initial.clone()
        self._spikes = SpikeFinder() if layers_on else None
        self._parameters_before: dict[nn.Parameter, Tensor] = {}
        self._attributes = bool(attribution_every) and self.processes.measures
        self._initial_state = self.subject.state() if self._attributes else {}
        self._goes_on = self._is_open = False
        self._writer: Writer | None = None  # of process 0, inside the context
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            with self.processes.first_succeeds():
                if self.processes.is_first:
                    self._writer = self._open_folder(stack)
            if self._goes_on:
                self._prepare()
            elif self.processes.measures:
                self._record_due(is_writing=self._writer is not None)
            self._is_open, self._order = True, StepOrder(self.optimizer, stack)
            self._resources = stack.pop_all()
        return self

    def step(self, loss: Tensor | float) -> None:
        """Measure the model after a step: between optimizer.step() and the next zero_grad().

        loss: of the batch of this step, without the factor of a gradient scaler; of a sharded
            model the mean over its processes is written, else process 0's.  After a loss or an F
            that is not finite nothing more is written.  A gradient that is not finite is written as
            it is: torch.amp.GradScaler leaves out such a step.

        Raises ConfigError outside of the context, for a loss that is not a number, if no parameter
        has a gradient, and at the second call of a loop whose optimizer makes its step after it.
        """
        self._refuse_outside("probe.step")
        loss = loss_of(loss)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients:
            raise ConfigError(
                "probe.step finds no gradient: call it after loss.backward() and optimizer.step(), "
                "before optimizer.zero_grad(); an optimizer that makes its steps in hooks of "
                "backward() must leave the gradients to probe.step (docs/tutorials/own_model.md)"
            )
        self.at += 1
        if self.at == 2:
            self._order.check_second()
        is_writing = self._writer is not None and self._writer.is_writing
        # the processes of a sharded model cannot know that process 0 has stopped writing
        if not (is_writing or self.processes.is_sharded):
            return
        has_row = self.at == 1 or is_due(self.every, self.at)
        if has_row or self._spikes:
            value = torch.as_tensor(loss).detach().reshape(()).to(self.subject.initial.device)
            value, norm = self.processes.mean(value), norm_of(gradients).to(value.device)
            if has_row:
                self._add_row(value, norm, is_writing=is_writing)
            if self._spikes:
                changes = self.subject.by_layer(self._change).tolist()
                self._spikes.follow(self.at, float(value), float(norm), changes)
        self._record_due(is_writing=is_writing)

    def evaluate(self, loss: Tensor | float) -> None:
        """Write the validation loss of the model after the last step to evals.csv.

        Only process 0's is written.  A run whose last one is not finite has diverged.  Raises
        ConfigError for a second one of the same step.
        """
        self._log("probe.evaluate", {"loss": loss})

    def log(self, **values: Tensor | float) -> None:
        """Write numbers of your own after the last step to logged.csv, a column a name.

        Calls with the same names share a file, and others get logged_2.csv, ….  Only process 0's
        are written.  Charts and `Run.log` find each column by its name.
        """
        self._log("probe.log", values)

    def state_dict(self) -> dict[str, Any]:
        """Return the probe's part of a checkpoint, after all rows so far are on the disk.

        It holds the step, F_0, the last F and, for attributions, θ_0: of a sharded model the part
        of this process, as the model's own state_dict does.  Processes that do not measure return
        the step alone.  Raises ConfigError after the context.
        """
        if self._attributes and not self._initial_state:
            raise ConfigError("probe.state_dict is called after its context; call it inside")
        if self._writer is not None:
            self._writer.sync()
        state: dict[str, Any] = {"step": self.at}
        if self.processes.measures:
            state |= {"initial": self.subject.initial, "last": self._last_F}
            state |= {"start": dict(self._initial_state)}
            state |= {"spikes": self._spikes.state()} if self._spikes else {}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the step of a state: call it before the context, with the weights loaded.

        The folder loses the rows of later steps, which the loop writes again.

        Raises ConfigError inside of the context, and for a state of another model.
        """
        if self._is_open:
            raise ConfigError(
                "probe.load_state_dict is called inside of its context; call it before `with probe`"
            )
        if self.processes.measures:
            self._load(state)
        self.at, self._goes_on = int(state["step"]), True

    def _load(self, state: Mapping[str, Any]) -> None:
        subject = self.subject
        initial, last, start = (state[key] for key in ("initial", "last", "start"))
        if initial.shape != subject.initial.shape or bool(start) != bool(self._initial_state):
            found, allowed = tuple(initial.shape), tuple(subject.initial.shape)
            raise ConfigError(
                f"probe.load_state_dict: found a state with F of shape {found} and "
                f"{len(start)} tensors of θ_0; allowed {allowed} and {len(self._initial_state)}: "
                "the same model, probe batch and attribution_every"
            )
        if start:
            subject.refuse_replaced(start)
        self._initial_state = {
            name: on_device_of(own, start[name]).detach().clone()
            for name, own in self._initial_state.items()
        }
        if self._spikes and "spikes" in state:
            self._spikes.load(state["spikes"])
        subject.initial = initial.detach().to(subject.initial).clone()
        self._last_F = last.detach().to(subject.initial).clone()

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        writer, self._writer, self._is_open = self._writer, None, False
        with self._resources:
            self._parameters_before, self._initial_state = {}, {}
            if writer is not None:
                writer.end(self.at, error)

    @property
    def run(self) -> Run:
        """Return the run as read from its folder."""
        return Run(self.folder.path)

    def _open_folder(self, stack: ExitStack) -> Writer:
        """Open a new run folder, or the one to go on with."""
        writer = Writer(self.folder, stack)
        if self._goes_on:
            writer.resume(self.config, environment_of(self.subject), self.at)
        else:
            scheme = self.config["model"]["scheme"]
            writer.begin(
                self.config,
                meta_of(self.subject, self.model, self.groups, self.seed),
                columns_of(self.subject, self.groups, scheme, self.name, spikes=bool(self._spikes)),
            )
        columns = ("step", *self.groups, "whole", "unexplained") if self.attribution_every else ()
        writer.open(columns, self.subject.initial.device, self.at, spikes=self._spikes is not None)
        return writer

    def _refuse_outside(self, call: str) -> None:
        if not self._is_open:
            raise ConfigError(f"{call} is called outside of its context: with probe(…) as probe")

    def _log(self, call: str, values: Mapping[str, Any]) -> None:
        self._refuse_outside(call)
        if self._writer is not None and self._writer.is_writing and values:
            self._writer.log(self.at, call, values)

    def _add_row(self, loss: Tensor, grad_norm: Tensor, *, is_writing: bool) -> None:
        """Measure the model update and add the row of this step to steps.csv."""
        F, initial = self.subject.hidden(), self.subject.initial
        values = model_update(F, initial, self._last_F, torch.linalg.vector_norm(initial))
        self._last_F = F
        measured = Measured(loss, grad_norm, values)
        if self.at == 1:
            self._order.note_first(values["model_update"], measured.grad_norm)
        if is_writing and self._writer is not None:
            lr = float(self.optimizer.param_groups[0]["lr"])
            self._writer.recorder.add(self.at, lr, measured)

    def _record_due(self, *, is_writing: bool) -> None:
        """Record the snapshot and the attribution due now, and prepare the row and snapshot after.

        The time of a step excludes all of them.
        """
        spike = self._spikes.spike if self._spikes else None
        snapshot = is_due(self.layers_every, self.at) or spike is not None
        attribution = self.at > 0 and is_due(self.attribution_every, self.at)
        writer = self._writer if is_writing else None
        if snapshot or attribution or self.every > 1:
            if writer is not None:
                writer.recorder.flush()
            if snapshot and self.subject.layers:
                values = self._snapshot()
                if writer is not None:
                    writer.records.add(self.at, values)
                    if spike:
                        writer.logs[SPIKES_LOG].write(spike._asdict())
            if attribution:
                parts = self.subject.attribution(self.groups, self._initial_state)
                row = {name: float(part) for name, part in parts.items()}
                if writer is not None:
                    writer.logs["attribution"].write({"step": self.at, **row})
            if self.every > 1 and is_due(self.every, self.at + 1):
                self._last_F = self.subject.hidden()  # the next row needs F_{t-1}
            if writer is not None:
                writer.recorder.pause()
        self._prepare()

    def _prepare(self) -> None:
        """Copy the parameters of the layers if a snapshot is due after the next step."""
        self._parameters_before = {}  # free the last copy before the next one
        may_be_due = self._spikes is not None or is_due(self.layers_every, self.at + 1)
        layers = self.subject.layers if may_be_due else ()
        if not self.processes.measures:
            layers = ()
        self._parameters_before = {
            p: p.detach().clone() for layer in layers for p in layer.parameters()
        }

    @torch.no_grad()
    def _snapshot(self) -> dict[str, Tensor]:
        """Return the values of every layer, (layers,) each."""
        subject = self.subject
        # before the first step ignore gradients that the model may still hold
        return {
            "stream_norm": subject.stream_norm(),
            "grad_norm": subject.by_layer(lambda p: p.grad if self.at else None),
            "param_norm": subject.by_layer(lambda p: p),
            "param_update_norm": subject.by_layer(self._change),
        }

    @torch.no_grad()
    def _change(self, parameter: nn.Parameter) -> Tensor:
        """Return the change of a parameter by the last step; 0 if it was not copied before."""
        return as_float(parameter) - as_float(self._parameters_before.get(parameter, parameter))


def refuse_intervals(every: object, intervals: Mapping[str, object]) -> None:
    """Raise ConfigError for an interval that is not a number of steps, or 'log' where allowed."""
    if not (isinstance(every, int) and every >= 1):
        raise ConfigError(f"every: found {every!r}; allowed an integer >= 1")
    for key, interval in intervals.items():
        if interval != "log" and not (isinstance(interval, int) and interval >= 0):
            raise ConfigError(f"{key}: found {interval!r}; allowed an integer >= 0, or 'log'")


def loss_of(loss: Tensor | float) -> Tensor | float:
    """Return a loss as a tensor with one real number, or as a number; else raise ConfigError."""
    if not isinstance(loss, Tensor):
        return number("probe.step: loss", loss)
    if loss.numel() != 1 or loss.is_complex():
        raise ConfigError(
            f"probe.step: found a loss of shape {tuple(loss.shape)} and {loss.dtype}; allowed a "
            "number, or a tensor with one, as of loss.mean()"
        )
    return loss
