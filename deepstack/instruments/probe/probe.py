"""`deepstack.probe`: the measurements of a run for an external model and training loop."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.base.errors import ChangedLogError, ConfigError
from deepstack.diagnostics import describe, model_update
from deepstack.fast import Measured
from deepstack.instruments.probe.groups import Groups, names_by_child, names_by_group
from deepstack.instruments.probe.model import ExternalModel, Hidden, as_float, norm_of
from deepstack.model.module_calls import Layers
from deepstack.records import STEPS_COLUMNS, TIMING_COLUMNS, AppendLog, Run, RunFolder, write_end
from deepstack.training.environment import versions
from deepstack.training.meta import entries, f0_norm, utc_now
from deepstack.training.observer import Observer
from deepstack.training.outcome import is_out_of_memory
from deepstack.training.recorder import Recorder, open_logs, sync_logs
from deepstack.training.schedule import is_due
from deepstack.training.snapshot_writer import LayerRecords

Interval = int | Literal["log"]

LAYERS = ("stream_norm", "grad_norm", "param_norm", "param_update_norm")
OWN_COLUMNS = {
    "loss": ("L", "", "What probe.step was given at step t."),
    "lr": ("η", "", "Learning rate of the optimizer's first group at probe.step."),
    "grad_norm": ("‖∇L‖", "", "Norm of the gradients that the model has at probe.step."),
}


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

    Training is the same with it and without it, bit for bit.

    batch: the fixed probe batch, on the model's device: a tensor is passed as model(batch), a tuple
        or list as model(*batch), a mapping as model(**batch).
    out: the run's folder, <study>/<run>; all runs of a study share the folder <study>.
    hidden: the source of F, the last hidden state, (…, d): the name of a module, for its output; a
        function of model and batch; by default the model's output (its `last_hidden_state` if it
        has one).  Logits are refused.  Every position counts, including padding.
    layers: the name of the layers' container, or a list of layers; by default the longest
        ModuleList whose members pass on a stream as wide as F; () for no values by layer.
    groups: name -> patterns of parameter names ("*.self_attn.*"); by default one group for each
        child of a layer and of the model.
    every: steps between two rows of steps.csv (the first step always has one).  A row takes one
        forward pass, or two if `every` is not 1.
    layers_every, attribution_every: steps between snapshots of every layer, and between
        attributions; 'log': 0, 1, 2, 3, 5, 8, …; 0: never.  An attribution takes a forward pass per
        group and a copy of all parameters.
    name: the model's name in charts (default: its class).
    seed: of the run; charts average over it.
    config: other settings of the run, which may vary within a study, by dotted key: {"task.name":
        "copy", "model.d_ff": 256}.

    Raises ConfigError, with a remedy, for a model or batch that it cannot read, and if `out`
    already holds a run.
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
        name: str | None = None,
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if not (isinstance(every, int) and every >= 1):
            raise ConfigError(f"every: found {every!r}; allowed an integer >= 1")
        intervals = {"layers_every": layers_every, "attribution_every": attribution_every}
        for key, interval in intervals.items():
            if interval != "log" and not (isinstance(interval, int) and interval >= 0):
                raise ConfigError(f"{key}: found {interval!r}; allowed an integer >= 0, or 'log'")
        self.model, self.optimizer, self.folder = model, optimizer, RunFolder(out)
        self.every, self.seed = every, seed
        self.layers_every, self.attribution_every = layers_every, attribution_every
        self.subject = ExternalModel(model, batch, hidden, layers)
        self.groups = (
            names_by_child(self.subject)
            if groups is None
            else names_by_group(list(self.subject.parameters), groups)
        )
        self.name = name or type(self.subject.model).__name__
        self.config = self._config(config or {})
        self.at = 0  # the number of the last step
        self._last_F = self.subject.initial.clone()
        self._records = LayerRecords(self.folder)
        self._parameters_before: dict[nn.Parameter, Tensor] = {}
        self._initial_state: dict[str, Tensor] = {}
        self._logs: dict[str, AppendLog] = {}
        self._recorder: Recorder | None = None
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.folder.lock())
            if self.folder.exists():
                raise ConfigError(
                    f"{self.folder.path} holds a run already; give another name with out="
                )
            self.folder.write_config(conf.yaml_of(self.config))
            self.folder.write_meta(self._meta())
            self.folder.write_columns(self._columns())
            self.folder.write_status("running", 0)
            columns = {}
            if self.attribution_every:
                columns["attribution"] = ("step", *self.groups, "whole", "unexplained")
                self._initial_state = self.subject.state()
            self._logs = open_logs(self.folder, columns, stack)
            no_limit = sys.float_info.max  # allow every finite loss: the bound is unknown
            device = self.subject.initial.device
            # a precision scaler leaves out a step whose gradients are not finite
            self._recorder = Recorder(
                self._logs, device, no_limit, Observer(), must_be_finite=("model_update",)
            )
            self._record_due(self._recorder)
            self._resources = stack.pop_all()
        return self

    def step(self, loss: Tensor | float) -> None:
        """Measure the model after a step: between optimizer.step() and the next zero_grad().

        loss: of the batch of this step, without the factor of a gradient scaler.  After a loss or
            an F that is not finite nothing more is written.  A gradient that is not finite is
            written as it is: torch.amp.GradScaler leaves out such a step.

        Raises ConfigError outside of the context, and if no parameter has a gradient.
        """
        recorder = self._recorder
        if recorder is None:
            raise ConfigError("probe.step is called outside of its context: with probe(…) as probe")
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients:
            raise ConfigError(
                "probe.step finds no gradient: call it after loss.backward() and optimizer.step(), "
                "before optimizer.zero_grad()"
            )
        self.at += 1
        if recorder.divergence is not None:
            return
        if self.at == 1 or is_due(self.every, self.at):
            self._add_row(recorder, loss, gradients)
        self._record_due(recorder)

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        with self._resources:
            self._parameters_before, self._initial_state = {}, {}
            recorder.flush()
            try:
                sums = sync_logs(self._logs.values(), ended=True)
            except ChangedLogError as changed:
                write_end(self.folder, "failed", self.at, error=str(changed))
                raise
            self._records.write()
            if (divergence := recorder.divergence) is not None:
                write_end(self.folder, "diverged", divergence.step, logs=sums, **divergence.facts())
            elif error is None:
                write_end(self.folder, "done", self.at, logs=sums)
            elif not isinstance(error, Exception):  # Ctrl-C, sys.exit
                write_end(self.folder, "interrupted", self.at)
            else:
                state = "out_of_memory" if is_out_of_memory(error) else "failed"
                write_end(self.folder, state, self.at, error=repr(error))

    @property
    def run(self) -> Run:
        """Return the run as read from its folder."""
        return Run(self.folder.path)

    def _add_row(
        self, recorder: Recorder, loss: Tensor | float, gradients: Sequence[Tensor]
    ) -> None:
        """Measure the model update and add the row of this step to steps.csv."""
        F, initial = self.subject.hidden(), self.subject.initial
        values = model_update(F, initial, self._last_F, torch.linalg.vector_norm(initial))
        self._last_F = F
        value = torch.as_tensor(loss).detach().reshape(()).to(F.device)
        measured = Measured(value, norm_of(gradients).to(F.device), values)
        recorder.add(self.at, float(self.optimizer.param_groups[0]["lr"]), measured)

    def _record_due(self, recorder: Recorder) -> None:
        """Record the snapshot and the attribution due now, and prepare the row and snapshot after.

        The time of a step excludes all of them.
        """
        snapshot = is_due(self.layers_every, self.at)
        attribution = self.at > 0 and is_due(self.attribution_every, self.at)
        if snapshot or attribution or self.every > 1:
            recorder.flush()
            if snapshot:
                self._take_snapshot()
            if attribution:
                parts = self.subject.attribution(self.groups, self._initial_state)
                row = {name: float(part) for name, part in parts.items()}
                self._logs["attribution"].write({"step": self.at, **row})
            if self.every > 1 and is_due(self.every, self.at + 1):
                self._last_F = self.subject.hidden()  # the next row needs F_{t-1}
            recorder.pause()
        self._parameters_before = {}  # free the last copy before the next one
        layers = self.subject.layers if is_due(self.layers_every, self.at + 1) else ()
        self._parameters_before = {
            p: p.detach().clone() for layer in layers for p in layer.parameters()
        }

    @torch.no_grad()
    def _take_snapshot(self) -> None:
        """Take a snapshot of every layer and write it."""
        subject, before = self.subject, self._parameters_before
        if not subject.layers:
            return
        # before the first step ignore gradients that the model may still hold
        values = {
            "stream_norm": subject.stream_norm(),
            "grad_norm": subject.by_layer(lambda p: p.grad if self.at else None),
            "param_norm": subject.by_layer(lambda p: p),
            "param_update_norm": subject.by_layer(
                lambda p: as_float(p) - as_float(before.get(p, p))
            ),
        }
        self._records.add(self.at, values)

    def _config(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of config.yaml: the known settings of the run, nested by section."""
        group = self.optimizer.param_groups[0]
        known: dict[str, Any] = {
            "seed": self.seed,
            "model.scheme": re.sub(r"\W+", "_", self.name),
            "model.depth": len(self.subject.layers),
            "model.d_model": self.subject.width or self.subject.f_width,
            "task.name": "unnamed",
            "train.optimizer": type(self.optimizer).__name__.lower(),
            "train.lr": float(group["lr"]),
            "train.weight_decay": float(group.get("weight_decay", 0.0)),
            "log.every": self.every,
            "log.layers_every": self.layers_every,
            "log.attribution_every": self.attribution_every,
        }
        nested: dict[str, Any] = {}
        for key, value in {**known, **more}.items():
            *sections, last = key.split(".")
            inner = nested
            for section in sections:
                inner = inner.setdefault(section, {})
            try:
                inner[last] = json.loads(json.dumps(value))  # lists for tuples
            except TypeError as error:
                raise ConfigError(f"config: {key}: {error}; allowed Python's own values") from error
        return nested

    def _meta(self) -> dict[str, Any]:
        """Return the content of meta.json: command, time, environment and measured modules."""
        subject, device = self.subject, self.subject.initial.device
        return {
            "command": " ".join(sys.argv),
            "created": utc_now(),
            "environment": versions(device) | {"threads": torch.get_num_threads()},
            "seed": self.seed,
            "parameters": {
                "trained": sum(p.numel() for p in subject.parameters.values() if p.requires_grad),
                "total": sum(p.numel() for p in self.model.parameters()),
            },
            "model": f"{type(subject.model).__module__}.{type(subject.model).__qualname__}",
            "hidden": subject.f_name,
            "layers": subject.layers_name,
            "groups": self.groups,
        }

    def _columns(self) -> dict[str, Any]:
        """Return the content of columns.json, which describes every column for the charts."""
        known = describe()
        layers = {key: known[key] for key in LAYERS}
        gradient = (
            "Norm of the training batch's gradient with respect to the parameters of each layer."
        )
        layers["grad_norm"] = (known["grad_norm"][0], "", gradient)
        shares = {
            name: (f"‖ΔF‖ of {name}", "", f"Mean over tokens of ‖F(θ_0 + Δθ of {name}) − F_0‖₂.")
            for name in self.groups
        }
        shares["whole"] = ("‖ΔF‖", "", "Mean over tokens of ‖F_t − F_0‖₂.")
        shares["unexplained"] = ("", "", "Mean over tokens of ‖ΔF − sum of what the groups do‖₂.")
        return {
            "columns": entries(STEPS_COLUMNS | OWN_COLUMNS | TIMING_COLUMNS),
            "layers": entries(layers),
            "attribution": entries(shares),
            "scheme": {
                "name": self.config["model"]["scheme"],
                "label": self.name,
                "normalised": self.subject.normalised,
            },
            **f0_norm(self.subject.initial),
            "references": {},
        }
