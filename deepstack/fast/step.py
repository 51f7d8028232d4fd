"""The training step.  The plain eager step below is the definition of every faster one."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack.fast.gpu.deferred_gradients import forget
from deepstack.gc_control import gc_paused
from deepstack.parameters.banks import Bank, Banks, global_norm


class Measured(NamedTuple):
    """What a step measures, as 0-d tensors on the device: nothing here waits for it.

    loss: of the batch before the update; grad_norm: before clipping; alive: 1.0 while every loss
    and gradient norm so far was finite, every model update before this step's too, and no loss
    exceeded the bound; probe: what the probe measured after the update, by name.
    settle: None, or the probe is measured with the next step, and calling this measures it now;
    until either, `probe` holds older numbers.
    """

    loss: Tensor
    grad_norm: Tensor
    alive: Tensor
    probe: dict[str, Tensor]
    settle: Callable[[], None] | None = None


Found = tuple[Tensor, Tensor]  # the loss and the norm of all gradients


@dataclass(frozen=True)
class Update:
    """A training step in two halves, (inputs, targets) -> Measured.

    gradients: (inputs, targets) -> Found; only reads parameters.  apply: Found -> Measured; changes
    them.
    """

    gradients: Callable[[Tensor, Tensor], Found]
    apply: Callable[[Tensor, Tensor], Measured]

    def __call__(self, inputs: Tensor, targets: Tensor) -> Measured:
        return self.apply(*self.gradients(inputs, targets))


Made = Callable[[Tensor, Tensor], Measured]
Probe = Callable[[], dict[str, Tensor]]
Step = Callable[[Tensor, Tensor, float], Measured]


def probed(update: Update, probe: Probe | None) -> Made:
    """The update, and what the probe measures after it."""
    if probe is None:
        return update
    return lambda inputs, targets: update(inputs, targets)._replace(probe=probe())


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """The bound method, without keeping its object alive: nothing to do where that is gone."""
    kept = weakref.WeakMethod(method)

    def call() -> None:
        if (found := kept()) is not None:
            found()

    return call


def make_step(
    loss: Callable[[Tensor, Tensor], Tensor],
    banks: Banks,
    trained: Sequence[Bank],
    optimizer: torch.optim.Optimizer,
    *,
    clip: float | None,
    max_loss: float,
    alive: Tensor,
    probe: Probe | None = None,
    share: Callable[[Tensor], Tensor] | None = None,
    norm_of: Callable[[Sequence[Bank]], Tensor] = global_norm,
    project: Callable[[], None] | None = None,
    capture: Callable[[Update, Probe | None], Made] = probed,
) -> Step:
    """A function (inputs, targets, lr) -> Measured that makes one update, or none after divergence.

    loss: (inputs, targets) -> the mean loss.  Every parameter group has a key 'factor': its
    learning rate is lr * factor.  The gradient is scaled by min(1, clip / its norm).  After a
    non-finite or too large value the update is masked on the device, for good: the parameters
    stay as they were, and no value of the host is waited for.

    probe: called after the update, measures the model; after a 'model_update' that is not finite
    the next update is masked too, which is begun before anyone has read it.
    share: called after the backward pass with the loss of this process's part of the batch; makes
    gradients those of the whole batch and returns its loss.  norm_of: the norm of all gradients
    then.
    project: called after every update, puts parameters back to where they are kept.  Once updates
    are masked it finds them there, and moves them by rounding at the most.
    capture: makes of update and probe, everything but the learning rate, one graph of a GPU, say.
    """

    make_update = bare_step(optimizer)
    told: Any = optimizer  # of found_inf and grad_scale, which no class of torch's declares
    moved = torch.zeros_like(alive)  # ‖ΔF‖ after the step before

    def gradients(inputs: Tensor, targets: Tensor) -> Found:
        banks.zero_gradients()
        with gc_paused():
            value = loss(inputs, targets)
            try:
                value.backward()
            except BaseException:
                forget()
                raise
        value = share(value.detach()) if share else value.detach()
        return value, norm_of(trained)

    def apply(value: Tensor, norm: Tensor) -> Measured:
        # Each is False for NaN.
        good = (norm < math.inf) & (value <= max_loss) & (moved < math.inf)
        alive.mul_(good)
        # torch's fused optimizers divide gradients by grad_scale and skip the step on found_inf.
        told.found_inf = 1.0 - alive
        if clip is not None:
            told.grad_scale = (norm / clip).clamp(min=1.0)
        make_update()
        if project is not None:
            project()
        return Measured(value, norm, alive.clone(), {})

    def watched(probe: Probe) -> dict[str, Tensor]:
        found = probe()
        if "model_update" in found:
            moved.copy_(found["model_update"])
        return found

    run = capture(Update(gradients, apply), probe and partial(watched, probe))

    def step(inputs: Tensor, targets: Tensor, lr: float) -> Measured:
        set_learning_rate(optimizer, lr)
        return run(inputs, targets)

    return step


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """The optimizer's own step, without what torch wraps around it.

    The wrappers import torch's compiler, which takes a second and which a run that compiles nothing
    never needs; what they do is call hooks, of which there are none here, and disable gradients.
    """
    step: Any = type(optimizer).step
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__

    def run() -> None:
        with torch.no_grad():
            step(optimizer)

    return run


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group lr * its factor, in place where the rate is a tensor."""
    for group in optimizer.param_groups:
        rate = lr * group["factor"]
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
