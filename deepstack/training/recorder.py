"""Rows of the run folder: kept on the device until they are due, so that training never waits."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from deepstack.records import STEPS_COLUMNS, TIMING_COLUMNS, RunFolder
from deepstack.speed import Measured
from deepstack.training.environment import peak_memory_mb
from deepstack.training.observer import Observer

LAG = 10  # steps between two looks at a GPU's results


class Divergence(NamedTuple):
    """Where a run left the finite numbers (or its bound): the last row of its log."""

    step: int
    quantity: str
    value: float


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
        self.device, self.max_loss, self.observer = device, max_loss, observer
        self.lag = 1 if device.type == "cpu" else LAG
        self.divergence: Divergence | None = None
        self._pending: list[tuple[int, float, Tensor]] = []
        self._names: list[str] = []
        self._clock = time.perf_counter()

    def add(self, step: int, lr: float, measured: Measured) -> None:
        """Keep the row of a step; it is written when enough have come together."""
        values = {"loss": measured.loss, "grad_norm": measured.grad_norm, **measured.probe}
        self._names = list(values)
        self._pending.append((step, lr, torch.stack([v.float() for v in values.values()])))
        if len(self._pending) >= self.lag:
            self.flush()

    def flush(self) -> None:
        """Write the rows kept back, up to and including the one that diverged."""
        if not self._pending or self.divergence:
            self._pending = []  # after a divergence nothing is a row of this run any more
            return
        rows = torch.stack([values for _, _, values in self._pending]).tolist()
        now = time.perf_counter()
        milliseconds = (now - self._clock) * 1000 / len(rows)
        self._clock = now
        memory = peak_memory_mb(self.device)
        for (step, lr, _), values in zip(self._pending, rows, strict=True):
            row = {"step": step, "lr": lr, **dict(zip(self._names, values, strict=True))}
            self.steps.write(row)
            self.timing.write((step, milliseconds, memory))
            self.observer.stepped(step, row)
            if found := self._diverged(row):
                self.divergence = Divergence(step, *found)
                break
        self._pending = []

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
        """Close both files."""
        self.steps.close()
        self.timing.close()
