"""Spikes: steps at which the loss or the gradient norm jumps, and the layer that moved first.

**The rule.**  Step t is a spike if its loss is more than 8 robust deviations above the median of
the 20 losses before, or if its gradient norm is more than 4 times the median of the 20 norms
before.  The robust deviation is 1.4826 times the median absolute deviation of these 20 losses, at
least 1 % of their median.  Loss and gradient norm of step t are of batch t at θ_{t−1}: nothing of a
later step is used.  Steps whose numbers are not finite are left out.  After a spike the 20 steps
that follow are none, so that a jump gives one record, and its own loss is in no window.

**The layer that moved first.**  The change of a layer's parameters at a step, ‖θ_t − θ_{t−1}‖, is
compared with the median of its changes in the 20 steps before (15 at the start of a run).  The
first of the steps t − 5 to t at which this factor is above 3 in some layer counts, and of it the
layer with the largest factor.  If there is no such step, no layer moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from deepstack.runs.spikes import GRAD_NORM_FACTOR, LOSS_DEVIATIONS, MOVED, WINDOW

PER_DEVIATION = 1.4826  # standard deviations of a normal distribution in its median absolute one
LARGEST_RATIO = 1e6
LOOK_BACK = 5  # steps before a spike at which a layer may have moved
KEPT = WINDOW + LOOK_BACK + 1
LEAST_DEVIATION = 0.01  # of the median: below it a rise is no jump, however calm the losses are


class Spike(NamedTuple):
    """A row of spikes.csv; see `deepstack.runs.spikes.SPIKES_COLUMNS`."""

    step: int
    loss_deviations: float
    grad_norm_factor: float
    moved_layer: int | None = None
    moved_step: int | None = None
    moved_factor: float | None = None
    moved_factor_median: float | None = None


class SpikeFinder:
    """Finds the spikes of a run while it trains, from the numbers of each step in turn.

    spike: the spike at the last step that `follow` was given, or None.
    """

    def __init__(self) -> None:
        self.spike: Spike | None = None
        self._last = -WINDOW  # the step of the last spike
        # (loss, gradient norm, step, change of each layer) of the last steps
        self._rows: list[list[float]] = []

    def follow(self, step: int, loss: float, grad_norm: float, changes: Sequence[float]) -> None:
        """Compare a step with those before it.

        changes: ‖θ_t − θ_{t−1}‖ of each layer.
        """
        self.spike = None
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return
        before, self._rows = self._rows, [*self._rows, [loss, grad_norm, step, *changes]][-KEPT:]
        if len(before) < WINDOW or step - self._last <= WINDOW:
            return
        losses, norms = ([row[i] for row in before[-WINDOW:]] for i in range(2))
        deviations = (loss - median(losses)) / robust_deviation(losses)
        factor = ratio(grad_norm, median(norms))
        if deviations > LOSS_DEVIATIONS or factor > GRAD_NORM_FACTOR:
            self._last = step
            self.spike = self._with_layer(Spike(step, deviations, factor))

    def _with_layer(self, spike: Spike) -> Spike:
        """Return the spike with the layer that moved first, if any did."""
        for back in reversed(range(LOOK_BACK + 1)):
            *before, row = self._rows[: len(self._rows) - back]
            factors = [
                ratio(row[i], median(r[i] for r in before[-WINDOW:])) for i in range(3, len(row))
            ]
            if factors and max(factors) > MOVED:
                return spike._replace(
                    moved_layer=1 + factors.index(max(factors)),
                    moved_step=int(row[2]),
                    moved_factor=max(factors),
                    moved_factor_median=median(factors),
                )
        return spike

    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint must store: the numbers of the last steps and the last spike."""
        return {
            "last": torch.tensor([self._last]),
            "rows": torch.tensor(self._rows, dtype=torch.float64),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on after the step whose state `state` returned."""
        self._last = int(state["last"].item())
        self._rows = state["rows"].tolist()


def robust_deviation(values: Sequence[float]) -> float:
    """Return 1.4826 times the median absolute deviation, at least 1 % of the median."""
    middle = median(values)
    spread = PER_DEVIATION * median(abs(value - middle) for value in values)
    return max(spread, LEAST_DEVIATION * abs(middle), 1e-30)


def ratio(value: float, usual: float) -> float:
    """Return a value over a usual one, at most a million; 0 for a value of 0 or NaN."""
    return value / max(usual, value / LARGEST_RATIO) if value > 0 else 0.0
