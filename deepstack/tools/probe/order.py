"""The optimizer of a training loop: the one inside of wrappers, and when it makes its steps."""

from contextlib import ExitStack
from typing import Any

import torch

from deepstack.base import ConfigError


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside of the wrappers of Accelerate, Trainer and ZeRO."""
    for name in ("optimizer", "optim"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return inner_optimizer(inner)
    return optimizer


class StepOrder:
    """Finds a loop that calls `probe.step` before the step of the optimizer, whose rows lag by one.

    A loop may also make its steps without this optimizer, or leave out some: only a first call
    without a step and without a change of F, followed by exactly one step, shows the order.
    """

    def __init__(self, optimizer: Any, stack: ExitStack) -> None:
        self.steps, self._is_first_early = 0, False
        inner = inner_optimizer(optimizer)
        if isinstance(inner, torch.optim.Optimizer):
            stack.callback(inner.register_step_post_hook(self._count).remove)

    def _count(self, *_: Any) -> None:
        self.steps += 1

    def note_first(self, moved: torch.Tensor, grad_norm: torch.Tensor) -> None:
        """Note ‖ΔF‖ and gradient norm at the first call; a scaler skips infinite gradients."""
        if not self.steps:
            self._is_first_early = not float(moved) and bool(torch.isfinite(grad_norm))

    def check_second(self) -> None:
        """Raise ConfigError at the second call if the optimizer has made its first step since."""
        if self._is_first_early and self.steps == 1:
            raise ConfigError(
                "probe.step is called before optimizer.step(), so that each row has the model of "
                "the step before; call it after optimizer.step() and before zero_grad(), as in "
                "on_optimizer_step of a callback, not in on_pre_optimizer_step"
            )
