"""Records a run: its rows, in groups, so that training never waits; its divergence; its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack.diagnostics import Culprit
from deepstack.fast import Measured
from deepstack.records import STEPS_COLUMNS, TIMING_COLUMNS, AppendLog, RunFolder
from deepstack.training.observer import Observer
from deepstack.training.resources import peak_memory_mb

# Without deterministic kernels a replayed row may differ by rounding that training has amplified.
TOLERANCE = 1e-2
LAG = 10  # steps between two reads of a GPU's results


class Divergence(NamedTuple):
    """The step, quantity and value with which a run diverged: the last row of its log."""

    step: int
    quantity: str
    value: float

    def facts(self) -> dict[str, Any]:
        """Return quantity and value as status.json has them."""
        return {"quantity": self.quantity, "value": repr(self.value)}


def cause(divergence: Divergence, place: Culprit) -> str:
    """Return 'step 3: loss is nan, first not finite in layer 2, forward' for a message."""
    step, quantity, value = divergence
    text = f"step {step}: {quantity} is {value:.4g}"
    if math.isfinite(value):
        return f"{text}, more than train.max_loss"
    if place.layer is not None:
        return f"{text}, first not finite in layer {place.layer}, {place.where}"
    named = place.where in ("embedding", "head")
    return f"{text}, first not finite in the {place.where}" if named else text


def open_logs(
    folder: RunFolder,
    columns: Mapping[str, Iterable[str]],
    resources: ExitStack,
    replay_from: int = -1,
    tolerance: float = 0.0,
) -> dict[str, AppendLog]:
    """Open steps.csv, timing.csv and further logs of a run until `resources` closes them.

    columns: name of a further log -> names of its columns.  Rows after `replay_from` that exist
        already are compared.
    """
    columns = {"steps": STEPS_COLUMNS, "timing": TIMING_COLUMNS, **columns}
    return {
        name: resources.enter_context(folder.log(name, names, replay_from, tolerance=tolerance))
        for name, names in columns.items()
    }


def sync_logs(logs: Collection[AppendLog], *, ended: bool = False) -> dict[str, str]:
    """Sync the logs to the disk and return the sha256 of each one by its file name.

    Raises ChangedLogError if a file differs from the rows written.
    """
    for log in logs:
        log.flush()
        log.check(ended=ended)
    return {log.path.name: log.sha256 for log in logs}


class PendingRow(NamedTuple):
    """A row that is not written yet; values: of the columns `names`, on the device."""

    step: int
    lr: float
    names: list[str]
    values: Tensor


def stacked(values: Mapping[str, Tensor]) -> Tensor:
    """Copy 0-d tensors into one of fp32, (values,): the next step may write into them."""
    return torch.stack([value.float() for value in values.values()])


class Recorder:
    """Writes steps.csv and timing.csv; finds the step at which a run diverged.

    must_be_finite: columns whose first value that is not finite is a divergence, besides the loss.
    """

    def __init__(
        self,
        logs: Mapping[str, AppendLog],
        device: torch.device,
        max_loss: float,
        observer: Observer,
        must_be_finite: Sequence[str] = ("grad_norm", "model_update"),
    ) -> None:
        self.steps, self.timing = logs["steps"], logs["timing"]
        self.device, self.max_loss, self.observer = device, max_loss, observer
        self.must_be_finite = must_be_finite
        self.lag = 1 if device.type == "cpu" else LAG
        self.divergence: Divergence | None = None
        self._pending: list[PendingRow] = []
        self._last: tuple[PendingRow, Measured] | None = None  # its probe may not be measured yet
        self._clock = time.perf_counter()

    def add(self, step: int, lr: float, measured: Measured) -> None:
        """Keep the row of step t; write all rows once there are `lag` of them.

        The row begins with the values of the step, at θ_{t-1}.  The values of the probe follow, at
        θ_t: now, or with `settle` when step t + 1 is added, beside which the probe has run.
        """
        self._add_probe()  # to row t - 1
        of_step = {"loss": measured.loss, "grad_norm": measured.grad_norm}
        self._last = PendingRow(step, lr, [*of_step], stacked(of_step)), measured
        if measured.settle is None:
            self._add_probe()  # to row t
        if len(self._pending) >= self.lag:
            self._write()

    def _add_probe(self) -> None:
        """Complete the last row with the values of its probe, unless that is done."""
        if self._last is None:
            return
        (step, lr, names, values), (_, _, probe, _) = self._last
        self._last = None
        values = torch.cat([values, stacked(probe)])
        self._pending.append(PendingRow(step, lr, [*names, *probe], values))

    def flush(self) -> None:
        """Write all pending rows, up to and including the one that diverged."""
        if self._last and (settle := self._last[1].settle) and not self.divergence:
            settle()
        self._add_probe()
        self._write()

    def _write(self) -> None:
        if not self._pending or self.divergence:
            self._pending = []  # the diverged row is the last one
            return
        rows = torch.stack([row.values for row in self._pending]).tolist()
        # A GPU runs behind the host, so that only the time of all pending steps is known.
        before, self._clock = self._clock, time.perf_counter()
        milliseconds = (self._clock - before) * 1000 / len(rows)
        memory = peak_memory_mb(self.device)
        for (step, lr, names, _), values in zip(self._pending, rows, strict=True):
            row = {"step": step, "lr": lr, **dict(zip(names, values, strict=True))}
            self.steps.write(row)
            self.timing.write({"step": step, "step_ms": milliseconds, "peak_memory_mb": memory})
            self.observer.stepped(step, {**row, "step_ms": milliseconds})
            if reason := self._diverged(row):
                self.divergence = Divergence(step, *reason)
                break
        self._pending = []

    def _diverged(self, row: dict[str, float]) -> tuple[str, float] | None:
        if not row["loss"] <= self.max_loss:  # False for a loss that is NaN
            return "loss", row["loss"]
        for name in self.must_be_finite:
            if not abs(row[name]) < float("inf"):
                return name, row[name]
        return None

    def pause(self) -> None:
        """Exclude the time since the last row, of an evaluation or snapshot, from the next step."""
        self._clock = time.perf_counter()

    def release(self) -> None:
        """Release the last step's tensors."""
        self._last = None


def mark_tolerated(
    folder: RunFolder, logs: Iterable[AppendLog], notify: Callable[[str], None]
) -> None:
    """Report rows computed again that differ within the tolerance, and mark meta.json."""
    if differing := [log for log in logs if log.tolerated]:
        rows = ", ".join(f"{log.tolerated} of {log.path.name}" for log in differing)
        notify(f"rows computed again differ within {TOLERANCE:.0%}: {rows}")
        meta = folder.read_meta()
        names = {*meta.get("differing_logs", []), *(log.path.name for log in differing)}
        folder.write_meta(meta | {"differing_logs": sorted(names)})
        for log in differing:
            log.tolerated = 0
