"""Refuses plugins whose training step writes into a buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from deepstack.errors import PluginError
from deepstack.fast import Measured, Step

StepFunction = Callable[[Tensor, Tensor, float], Measured]


def refuse_buffer_writes(step: Step, model: nn.Module) -> StepFunction:
    """Return the step; its first call raises PluginError if it writes into a plugin's buffer.

    A checkpoint keeps parameters only, and each measurement would change the buffer again.  Only
    `Scheme.at_step` may set buffers: it derives them from the number of the step.
    """
    buffers = [
        (f"{name} of {type(module).__name__}", module._buffers, name)
        for module in model.modules()
        if type(module).__module__.split(".")[0] not in ("deepstack", "torch")
        for name in module._buffers
    ]
    checked = not buffers

    def versions() -> list[Any]:
        tensors = (owner.get(name) for _, owner, name in buffers)
        return [(id(tensor), None if tensor is None else tensor._version) for tensor in tensors]

    def run(inputs: Tensor, targets: Tensor, lr: float) -> Measured:
        nonlocal checked
        if checked:
            return step(inputs, targets, lr)
        before, checked = versions(), True
        measured = step(inputs, targets, lr)
        for (buffer, _, _), old, new in zip(buffers, before, versions(), strict=True):
            if old != new:
                raise PluginError(
                    f"a step writes into the buffer {buffer}, which no checkpoint keeps and every "
                    "measurement would change; allowed are values that at_step sets, and parameters"
                )
        return measured

    return run
