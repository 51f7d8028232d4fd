"""A whole training step as one CUDA graph: launched at once instead of kernel by kernel."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from deepstack.errors import ResourceError
from deepstack.speed.step import Measured, Probe, Update, probed

# Steps made eagerly, on the stream that captures: libraries and the allocator set themselves up,
# and the optimizer makes its state.
WARM_UP = 3


def capture(update: Update, probe: Probe | None, said: Callable[[str], None]) -> Update:
    """The update and the probe after it, whose fourth and later calls replay a CUDA graph of them.

    Inputs and targets are copied into the graph's own tensors; what it returns are its own tensors
    too, overwritten by the next call.  Learning rates must be tensors, changed in place; nothing
    in the update may wait for the device.  said: told how long capturing took.  Raises
    ResourceError where the update cannot be captured.
    """
    return _Captured(probed(update, probe), said)


class _Captured:
    def __init__(self, update: Update, said: Callable[[str], None]) -> None:
        self.update, self.said = update, said
        self.stream = torch.cuda.Stream()
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Measured:
        self.calls += 1
        if self.calls == 1:
            self.inputs, self.targets = inputs.clone(), targets.clone()
        self.inputs.copy_(inputs, non_blocking=True)
        self.targets.copy_(targets, non_blocking=True)
        if self.calls <= WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                measured = self.update(self.inputs, self.targets)
            torch.cuda.current_stream().wait_stream(self.stream)
            return measured
        if self.graph is None:
            self.record()
        assert self.graph is not None
        self.graph.replay()
        return self.measured

    def record(self) -> None:
        """Capture the update; this launches nothing."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.graph = torch.cuda.CUDAGraph()
        try:
            # The outer context leaves the capturing stream where the capture itself fails.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(self.graph, stream=self.stream),
            ):
                self.measured = self.update(self.inputs, self.targets)
        except RuntimeError as error:
            self.graph = None
            cause = error.__context__ or error  # what went wrong first, inside of the capture
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise ResourceError(
                f"a step could not be captured as a CUDA graph: {cause}\n"
                "to launch kernel by kernel: runtime.cuda_graph=false"
            ) from cause
        self.said(f"captured a step as one CUDA graph in {time.perf_counter() - began:.1f} s")
