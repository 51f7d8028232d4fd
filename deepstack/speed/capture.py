"""A whole training step as one CUDA graph: launched at once instead of kernel by kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from deepstack.errors import ResourceError
from deepstack.speed.step import Measured, Probe, Update, probed

# Steps made eagerly, on the stream that captures: libraries and the allocator set themselves up,
# and the optimizer makes its state.
WARM_UP = 3


def capture(
    update: Update, probe: Probe | None, said: Callable[[str], None], insist: bool = False
) -> Update:
    """The update and the probe after it, whose fourth and later calls replay a CUDA graph of them.

    Inputs and targets are copied into the graph's own tensors; what it returns are its own tensors
    too, overwritten by the next call.  Learning rates must be tensors, changed in place; nothing
    in the update may wait for the device.  said: told how long capturing took, or why the update
    cannot be captured: it is then launched kernel by kernel, which gives the same bits.  insist:
    ResourceError instead.
    """
    return _Captured(probed(update, probe), said, insist)


class _Captured:
    def __init__(self, update: Update, said: Callable[[str], None], insist: bool) -> None:
        self.update, self.said, self.insist = update, said, insist
        self.stream = torch.cuda.Stream()
        self.calls, self.refused = 0, False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, inputs: Tensor, targets: Tensor) -> Measured:
        self.calls += 1
        if self.calls == 1:
            self.inputs, self.targets = inputs.clone(), targets.clone()
        self.inputs.copy_(inputs, non_blocking=True)
        self.targets.copy_(targets, non_blocking=True)
        if self.graph is None and self.calls > WARM_UP and not self.refused:
            self.record()
        if self.graph is not None:
            self.graph.replay()
            return self.measured
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            measured = self.update(self.inputs, self.targets)
        torch.cuda.current_stream().wait_stream(self.stream)
        return measured

    def record(self) -> None:
        """Capture the update; this launches nothing."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        random = torch.cuda.get_rng_state()
        try:
            # The outer context leaves the capturing stream where the capture itself fails.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, pool=pool, stream=self.stream),
            ):
                self.measured = self.update(self.inputs, self.targets)
        except RuntimeError as error:
            cause = error.__context__ or error  # what went wrong first, inside of the capture
            abandon(pool, random)
            if not self.insist:
                self.refused = True
                why = str(cause).splitlines()[0]
                self.said(f"kernels are launched one by one; a step cannot be captured: {why}")
                return
            if isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise ResourceError(
                f"a step could not be captured as a CUDA graph: {cause}\n"
                "to launch kernel by kernel: runtime.cuda_graph=false"
            ) from cause
        self.graph = graph
        self.said(f"captured a step as one CUDA graph in {time.perf_counter() - began:.1f} s")


def abandon(pool: tuple[int, int], random: Tensor) -> None:
    """Put right what torch does at the end of a capture, and never does of one that failed.

    Else it frees no memory that it has kept, and every random number is an error.  random: the
    generator's state before.
    """
    device, inside = torch.cuda.current_device(), vars(torch._C)
    with suppress(RuntimeError):  # nothing is put into the pool any more
        inside["_cuda_endAllocateToPool"](device, pool)
        inside["_cuda_releasePool"](device, pool)
    fresh = torch.Generator(torch.device("cuda", device))
    fresh.set_state(random)
    torch.cuda.default_generators[device].graphsafe_set_state(fresh.graphsafe_get_state())
