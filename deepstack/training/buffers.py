"""Refuses a step that writes into a plugin's buffer."""

from collections.abc import Callable

from torch import Tensor, nn

from deepstack.base.errors import PluginError
from deepstack.fast import Measured, Step

StepFunction = Callable[[Tensor, Tensor, float], Measured]


def refuse_buffer_writes(step: Step, model: nn.Module) -> StepFunction:
    """Return the step; it raises PluginError if it writes into a plugin's buffer.

    A checkpoint keeps parameters only, and each measurement would change the buffer again.  Only
    `Scheme.at_step` may set buffers: it derives them from the number of the step.
    """
    of_plugins = [
        module
        for module in model.modules()
        if type(module).__module__.split(".")[0] not in ("deepstack", "torch") and module._buffers
    ]

    def versions() -> list[tuple[str, int, int | None]]:
        return [
            (f"{name} of {type(module).__name__}", id(x), None if x is None else x._version)
            for module in of_plugins
            for name, x in module._buffers.items()
        ]

    def checked_step(inputs: Tensor, targets: Tensor, lr: float) -> Measured:
        before = versions()
        measured = step(inputs, targets, lr)
        for old, new in zip(before, versions(), strict=True):
            if old != new:
                raise PluginError(
                    f"a step writes into the buffer {old[0]}, which no checkpoint keeps and every "
                    "measurement would change; allowed are values that at_step sets, and parameters"
                )
        return measured

    return checked_step if of_plugins else step
