"""Snapshots of every layer, attributions of ‖ΔF‖ and the sharpness, at selected steps."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.base.errors import ResourceError
from deepstack.diagnostics import ModelUpdate, evaluate, take
from deepstack.diagnostics.snapshot import stream_states
from deepstack.instruments.attribution import measure as parts
from deepstack.instruments.bound.measure import uncovered_names
from deepstack.instruments.noise_scale.measure import COLUMNS as NOISE
from deepstack.instruments.noise_scale.measure import gradient_noise
from deepstack.instruments.sharpness.measure import COLUMNS as SHARPNESS
from deepstack.instruments.sharpness.measure import sharpness
from deepstack.model.banks import Bank
from deepstack.model.build import Built
from deepstack.records import AppendLog, RunFolder
from deepstack.tasks import IGNORE
from deepstack.training.evaluation import mean_loss
from deepstack.training.muon import Muon
from deepstack.training.preflight import Prepared
from deepstack.training.ranks import whole_copy
from deepstack.training.schedule import learning_rate, row_is_due

# Number of written records for each one that may be missing on the disk.
RECORDS_PER_PENDING = 32


class LayerRecords:
    """Records of every layer in the order of their steps, and in layers/ of a run folder.

    A file in layers/ is replaced atomically, with all records.  Replacing it for every snapshot
    would cost time that grows with the square of their number.  From 64 records on it is replaced
    when one in 32 is missing, and whenever `write` is called.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._steps: list[int] = []
        self._values: dict[str, list[Tensor]] = {}  # each (records, depth), to be joined
        self._written = 0

    def add(self, step: int, values: Mapping[str, Tensor]) -> None:
        """Add the values of every layer after a step: name -> (depth,)."""
        for name, value in values.items():
            self._values.setdefault(name, []).append(value.cpu().reshape(1, -1))
        self._steps.append(step)
        if len(self._steps) - self._written >= max(1, self._written // RECORDS_PER_PENDING):
            self.write()

    def write(self) -> None:
        """Write all records to the folder, if any are missing there."""
        if len(self._steps) > self._written:
            values = self.state()
            del values["steps"]
            self.folder.write_layers(values, self._steps)
            self._written = len(self._steps)

    def state(self) -> dict[str, Tensor]:
        """Return the records for a checkpoint: name -> (records, depth), and their steps."""
        for rows in self._values.values():
            rows[:] = [torch.cat(rows)]
        values = {name: rows[0] for name, rows in self._values.items()}
        return values | {"steps": torch.tensor(self._steps, dtype=torch.int64)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the records that `state` returned; the folder may lack some of them."""
        self._steps = state["steps"].tolist()
        self._values = {name: [rows] for name, rows in state.items() if name != "steps"}
        self._written = 0


class SnapshotWriter:
    """Takes snapshots of every layer and role on the probe batch, without disturbing training.

    Create it before a checkpoint is loaded: it keeps the present parameters as θ_0.
    """

    def __init__(
        self,
        prepared: Prepared,
        built: Built,
        probe: tuple[Tensor, Tensor],
        update: ModelUpdate,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        config = prepared.config
        self.prepared, self.config = prepared, config
        self.built, self.update = built, update
        self.inputs, self.targets = probe
        self.optimizer = optimizer
        self.parts = parts.parts_of(built) if config.log.attribution_every else []
        self._banks = [bank for bank in built.banks if bank.in_layers]
        banks = built.banks.all if self.parts else self._banks
        self._initial: dict[str, Tensor] = {}
        if config.log.layers_every or self.parts:
            self._initial = {bank.key: on_host(bank.values()) for bank in banks}
        self._initial_states: dict[str, Tensor] | None = None
        if config.log.stream_update:
            copy = whole_copy(prepared, built)
            self._initial_states = stream_states(copy.model, self.inputs) if copy else None
        self._before: list[Tensor] | None = None
        self.records = LayerRecords(prepared.folder)
        self._loss = partial(mean_loss, targets=self.targets)
        self.logs: Mapping[str, AppendLog] = {}  # of `columns`, opened after a checkpoint is loaded

    def columns(self) -> dict[str, dict[str, tuple[str, str, str]]]:
        """Return symbol, unit and description of each column of the logs that this writes."""
        log = self.config.log
        attributed = parts.columns_of(self.built, self.parts) if self.parts else {}
        logs = {
            "attribution": attributed,
            "first_order": attributed if log.first_order else {},
            "noise_scale": NOISE if log.noise_scale else {},
            "sharpness": SHARPNESS if log.sharpness_every else {},
        }
        return {name: columns for name, columns in logs.items() if columns}

    def is_due(self, step: int) -> bool:
        """Return whether a snapshot, an attribution or the sharpness is due after this step."""
        return any(
            row_is_due(self.config, log, step) for log in ("layers", "attribution", "sharpness")
        )

    def prepare(self, step: int) -> None:
        """Copy the parameters before a step after which a snapshot is due."""
        due = row_is_due(self.config, "layers", step)
        self._before = [bank.values().clone() for bank in self._banks] if due else None

    def take(self, step: int) -> None:
        """Take the snapshots due at this step and write them."""
        device = self.inputs.device
        copy = whole_copy(self.prepared, self.built)
        before, self._before = self._before, None
        if copy is None:
            return
        if row_is_due(self.config, "layers", step):
            self._take_layers(copy, step, [b.to(device) for b in before] if before else None)
        if row_is_due(self.config, "attribution", step):
            self._attribute(copy, step)
        if row_is_due(self.config, "sharpness", step):
            train = self.config.train
            loss = partial(self._loss, smoothing=train.label_smoothing)
            row = sharpness_row(copy, self.optimizer, train, step, self.inputs, loss)
            self.logs["sharpness"].write({"step": step, **row})

    def _take_layers(self, whole: Built, step: int, before: list[Tensor] | None) -> None:
        banks = [bank for bank in whole.banks if bank.in_layers]
        noise = self._take_noise(whole, step) if self.config.log.noise_scale else None
        values = evaluate(
            take(
                whole.model,
                banks,
                self.inputs,
                self._loss,
                before=before,
                initial=[self._initial[bank.key] for bank in banks],
                skipped=self.config.log.skipped_layers,
                jacobian=self.config.log.jacobian,
                seed=self.config.seed,
                initial_states=self._initial_states,
                gradient_noise=noise,
            )
        )
        uncovered = uncovered_names(self.config.model)
        for name in values:
            if name.startswith(uncovered):
                values[name] = torch.full_like(values[name], float("nan"))
        self.records.add(step, values)

    def _take_noise(self, whole: Built, step: int) -> dict[str, Tensor]:
        """Write the model's row of noise_scale.csv; return S and |G|² of the layers."""
        smoothing, unique = self.config.train.label_smoothing, whole.banks.unique
        count = int((self.targets != IGNORE).sum()) / len(self.targets)

        def loss(logits: Tensor, i: int) -> Tensor:
            return mean_loss(logits, self.targets[i : i + 1], count, smoothing=smoothing)

        noise = gradient_noise(whole.model, whole.trained, self.inputs, loss, unique)
        self.logs["noise_scale"].write({"step": step, **noise.row()})
        return noise.by_layer

    def _attribute(self, whole: Built, step: int) -> None:
        arguments = whole, self._initial, self.inputs, self.parts
        origin = self.config.log.attribution_from
        attributed = parts.attribute(*arguments, start=self.update.initial, origin=origin)
        # Use the probe's values after the step, so that the number equals that of steps.csv.
        attributed[parts.WHOLE] = parts.distance(self.update.previous - self.update.initial)
        rows = {"attribution": attributed}
        if self.config.log.first_order:
            rows["first_order"] = parts.first_order(*arguments)
        for log, row in rows.items():
            values = {name: value.item() for name, value in row.items()}
            self.logs[log].write({"step": step, **values})

    def close(self) -> None:
        """Write the pending snapshots of a failed run if the disk allows."""
        with contextlib.suppress(ResourceError):
            self.records.write()


def on_host(values: Tensor) -> Tensor:
    """Return a copy in host memory: θ_0 is read only once per snapshot.

    Ranks other than 0 have no values of a sharded bank; theirs stay on the meta device.
    """
    return values.cpu() if values.is_cuda else values.clone()


def sharpness_row(
    built: Built,
    optimizer: torch.optim.Optimizer,
    train: conf.Train,
    step: int,
    tokens: Tensor,
    loss: Callable[[Tensor], Tensor],
) -> dict[str, float | None]:
    """Return the columns of sharpness.csv at the parameters after this step, without the step."""
    scales = preconditioner_scales(optimizer, built.trained)
    plain, preconditioned = sharpness(built, tokens, loss, scales)
    is_known = scales is not None
    return {
        "sharpness": plain.value,
        "sharpness_residual": plain.residual,
        "preconditioned_sharpness": preconditioned.value if is_known else None,
        "preconditioned_residual": preconditioned.residual if is_known else None,
        "stability_threshold": stability_threshold(train, max(step, 1)) if is_known else None,
        "hessian_products": plain.products + preconditioned.products,
    }


def stability_threshold(train: conf.Train, step: int) -> float:
    """Return the curvature above which the optimizer diverges at the rate η of a step.

    SGD with momentum β, θ ← θ − ηm, m ← βm + g: (2 + 2β)/η.  Adam with frozen second moments,
    m ← βm + (1 − β)g: (2 + 2β)/((1 − β)η), 38/η at β = 0.9 (Cohen et al. 2022, arXiv:2207.14484).
    """
    rate = learning_rate(train, step)
    beta = train.momentum if train.optimizer == "sgd" else train.betas[0]
    sgd = (2 + 2 * beta) / rate
    return sgd if train.optimizer == "sgd" else sgd / (1 - beta)


def preconditioner_scales(
    optimizer: torch.optim.Optimizer, banks: Sequence[Bank]
) -> list[Tensor] | None:
    """Return the diagonal of P^{−1/2} of each bank, (depth, …); the optimizer moves by −η m / P.

    SGD: P = 1/f, f the factor on the rate of a parameter group.  Adam after t steps:
    P = (1 − β1^t) (√(v/(1 − β2^t)) + ε)/f.  0 where v is 0, since no such entry has moved yet.
    None for Muon, and for Adam before its first step.
    """
    if isinstance(optimizer, Muon):
        return None
    group_of = {p: group for group in optimizer.param_groups for p in group["params"]}
    scales = []
    for bank in banks:
        group = group_of[bank.parameters[0]]
        if "betas" not in group:
            scales.append(torch.full_like(bank.values(), group["factor"]).sqrt())
            continue
        states = [optimizer.state[p] for p in bank.parameters]
        if not states[0]:
            return None
        beta1, beta2 = group["betas"]
        t = float(states[0]["step"])
        v = bank.shaped(bank.whole([state["exp_avg_sq"] for state in states]))
        P = (1 - beta1**t) * ((v / (1 - beta2**t)).sqrt() + group["eps"])
        scales.append(torch.where(v > 0, (group["factor"] / P).sqrt(), 0.0))
    return scales
