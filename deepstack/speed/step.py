"""The training step.  The plain eager step below is the definition of every faster one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepstack.speed.banks import Bank, Banks, global_norm


class Measured(NamedTuple):
    """What a step measures, as 0-d tensors on the device: nothing here waits for it.

    loss: of the batch before the update; grad_norm: before clipping; alive: 1.0 while every loss
    and gradient norm so far was finite and no loss exceeded the bound.
    """

    loss: Tensor
    grad_norm: Tensor
    alive: Tensor


Step = Callable[[Tensor, Tensor, float], Measured]


def make_step(
    loss: Callable[[Tensor, Tensor], Tensor],
    banks: Banks,
    trained: Sequence[Bank],
    optimizer: torch.optim.Optimizer,
    *,
    clip: float | None,
    max_loss: float,
    alive: Tensor,
) -> Step:
    """A function (inputs, targets, lr) -> Measured that makes one update, or none after divergence.

    loss: (inputs, targets) -> the mean loss.  Every parameter group has a key 'factor': its
    learning rate is lr * factor.  The gradient is scaled by min(1, clip / its norm).  After a
    non-finite or too large value the update is masked on the device, for good: the parameters
    stay as they were, and no value of the host is waited for.
    """

    def step(inputs: Tensor, targets: Tensor, lr: float) -> Measured:
        banks.zero_gradients()
        value = loss(inputs, targets)
        value.backward()
        value = value.detach()
        norm = global_norm(trained)
        good = torch.isfinite(norm) & (value <= max_loss)  # False for a loss that is NaN
        alive.mul_(good)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["factor"]
        # torch's fused optimizers divide gradients by grad_scale and skip the step on found_inf.
        optimizer.found_inf = 1.0 - alive  # type: ignore[attr-defined]
        if clip is not None:
            optimizer.grad_scale = (norm / clip).clamp(min=1.0)  # type: ignore[attr-defined]
        optimizer.step()
        return Measured(value, norm, alive.clone())

    return step
