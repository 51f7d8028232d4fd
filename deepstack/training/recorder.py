"""Rows of the run folder: kept on the device until they are due, so that training never waits."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor

from deepstack.diagnostics import Culprit
from deepstack.fast import Measured
from deepstack.records import STEPS_COLUMNS, TIMING_COLUMNS, RunFolder
from deepstack.training.environment import peak_memory_mb
from deepstack.training.observer import Observer

LAG = 10  # steps between two looks at a GPU's results


class Divergence(NamedTuple):
    """Where a run left the finite numbers (or its bound): the last row of its log."""

    step: int
    quantity: str
    value: float


def cause(found: Divergence, place: Culprit) -> str:
    """'step 3: loss is nan, first not finite in layer 2, forward': what status.json has too."""
    text = f"step {found.step}: {found.quantity} is {found.value:.4g}"
    if math.isfinite(found.value):
        return f"{text}, more than train.max_loss"
    if place.layer is not None:
        return f"{text}, first not finite in layer {place.layer}, {place.where}"
    named = place.where in ("embedding", "head")
    return f"{text}, first not finite in the {place.where}" if named else text


class Row(NamedTuple):
    """A row that is not written yet; values: in the order of its columns, on the device."""

    step: int
    lr: float
    milliseconds: float | None  # None: what the rows written together took, shared among them
    values: Tensor


class Recorder:
    """Writes steps.csv and timing.csv; finds the step at which a run diverged."""

    def __init__(
        self,
        folder: RunFolder,
        replay_from: int,
        device: torch.device,
        max_loss: float,
        observer: Observer,
        tolerance: float,
    ) -> None:
        self.steps = folder.log("steps", STEPS_COLUMNS, tolerance=tolerance).open(replay_from)
        self.timing = folder.log("timing", TIMING_COLUMNS).open(replay_from)
        self.logs = [self.steps, self.timing]
        self.device, self.max_loss, self.observer = device, max_loss, observer
        self.lag = 1 if device.type == "cpu" else LAG
        self.divergence: Divergence | None = None
        self._pending: list[Row] = []
        self._last: tuple[Row, Measured] | None = None  # its probe may not be measured yet
        self._names: list[str] = []
        self._clock = time.perf_counter()

    def add(self, step: int, lr: float, measured: Measured) -> None:
        """Keep the row of a step; it is written when enough have come together.

        A probe that was left to the next step has been measured when that step is added.
        """
        self._complete()
        begun = torch.stack([measured.loss.float(), measured.grad_norm.float()])
        # a CPU has done what it was told; of a GPU only the time of many steps is known
        milliseconds = self._lapse() if self.lag == 1 else None
        self._last = Row(step, lr, milliseconds, begun), measured
        if measured.settle is None:
            self._complete()
        if len(self._pending) >= self.lag:
            self._write()

    def _complete(self) -> None:
        """Take up what was measured after the last step."""
        if self._last is None:
            return
        (row, measured), self._last = self._last, None
        self._names = ["loss", "grad_norm", *measured.probe]
        values = [row.values, *(v.float().reshape(1) for v in measured.probe.values())]
        self._pending.append(row._replace(values=torch.cat(values)))

    def flush(self) -> None:
        """Write the rows kept back, up to and including the one that diverged."""
        if self._last and (settle := self._last[1].settle) and not self.divergence:
            settle()
        self._complete()
        self._write()

    def _write(self) -> None:
        if not self._pending or self.divergence:
            self._pending = []  # after a divergence nothing is a row of this run any more
            return
        found = torch.stack([row.values for row in self._pending]).tolist()
        if self._pending[0].milliseconds is None:
            each = self._lapse() / len(found)
            self._pending = [row._replace(milliseconds=each) for row in self._pending]
        memory = peak_memory_mb(self.device)
        for (step, lr, milliseconds, _), values in zip(self._pending, found, strict=True):
            row = {"step": step, "lr": lr, **dict(zip(self._names, values, strict=True))}
            self.steps.write(row)
            self.timing.write((step, milliseconds, memory))
            self.observer.stepped(step, {**row, "step_ms": milliseconds})
            if bad := self._diverged(row):
                self.divergence = Divergence(step, *bad)
                break
        self._pending = []

    def _lapse(self) -> float:
        """Milliseconds since this was asked last, or since a pause."""
        before, self._clock = self._clock, time.perf_counter()
        return (self._clock - before) * 1000

    def _diverged(self, row: dict[str, float]) -> tuple[str, float] | None:
        if not row["loss"] <= self.max_loss:  # False for a loss that is NaN
            return "loss", row["loss"]
        for name in ("grad_norm", "model_update"):
            if not abs(row[name]) < float("inf"):
                return name, row[name]
        return None

    def pause(self) -> None:
        """Leave the time since the last row out of the next step's: an evaluation, a snapshot."""
        self._clock = time.perf_counter()

    def close(self) -> None:
        """Close both files, and let go of the last step."""
        self._last = None
        self.steps.close()
        self.timing.close()
