"""Refuses plugins whose training step writes into a buffer."""

from __future__ import annotations

from collections.abc import Callable

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
        (f"{name} of {type(module).__name__}", module, name)
        for module in model.modules()
        if type(module).__module__.split(".")[0] not in ("deepstack", "torch")
        for name in module._buffers
    ]
    is_first = True

    def versions() -> list[tuple[int, int | None]]:
        tensors = [module._buffers.get(name) for _, module, name in buffers]
        return [(id(tensor), None if tensor is None else tensor._version) for tensor in tensors]

    def checked_step(inputs: Tensor, targets: Tensor, lr: float) -> Measured:
        nonlocal is_first
        if not is_first:
            return step(inputs, targets, lr)
        before, is_first = versions(), False
        measured = step(inputs, targets, lr)
        for (buffer, _, _), old, new in zip(buffers, before, versions(), strict=True):
            if old != new:
                raise PluginError(
                    f"a step writes into the buffer {buffer}, which no checkpoint keeps and every "
                    "measurement would change; allowed are values that at_step sets, and parameters"
                )
        return measured

    return checked_step if buffers else step
