"""Captures a training step and other passes as CUDA graphs instead of launching kernel by kernel.

Three graphs of a step compute the gradients, apply them and probe the model.  The first and the
last only read parameters, so the probe of one step can run concurrently with the gradients of the
next.  Evaluations and the passes of snapshots are one graph each.  This helps where the kernels
are too small to fill a GPU.
"""

import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack.base.errors import ResourceError
from deepstack.fast.gpu.deferred_gradients import join
from deepstack.fast.step import Measured, Probe, Update

# Eager steps on the capturing stream: libraries and the allocator initialize, and the optimizer
# creates its state.
WARM_UP = 1
# Times that a pass is captured before it is launched kernel by kernel for good.  The first capture
# fails where a library must initialize outside of one; the eager pass after it does that.
ATTEMPTS = 2
# Layers per graph, if one graph of all layers is too large.
LAYERS = 250

# parts(every, between): a context in which `between` is called after every so many layers, in the
# forward and in the backward pass.
Parts = Callable[[int, Callable[[], None]], AbstractContextManager[None]]


class Graphs(list[torch.cuda.CUDAGraph]):
    """CUDA graphs that are launched in sequence."""

    def replay(self) -> None:
        """Launch all graphs in order."""
        for graph in self:
            graph.replay()

    def reset(self) -> None:
        """Free the graphs now, even if they are still referenced.

        torch then frees the stream's BLAS workspace, which later graphs of the stream also use."""
        for graph in self:
            graph.reset()


class _Recorded(NamedTuple):
    gradients: Graphs
    apply: Graphs
    probe: Graphs  # none without a probe
    measured: Measured


class CapturedStep:
    """A step, update then probe, whose second and later calls replay CUDA graphs.

    Inputs and targets are copied into tensors of the graphs.  The returned tensors belong to the
    graphs too; the next call overwrites them.  Learning rates must be tensors, changed in place;
    nothing in the update may wait for the device.

    notify: receives the time of the capture, or why it failed.  Kernels are then launched one by
        one, with the same bits.
    required: raise ResourceError instead.

    concurrent: whether the probe may run beside the next call (`Measured.settle`).  It must be
        False if anything that the model reads changes between two calls.
    parts: splits the layers over several graphs if memory is too small for one.
    """

    def __init__(
        self,
        update: Update,
        probe: Probe | None,
        notify: Callable[[str], None],
        required: bool = False,
        *,
        concurrent: bool = True,
        parts: Parts | None = None,
    ) -> None:
        self.update, self.probe, self.notify, self.parts = update, probe, notify, parts
        self.required, self.concurrent = required, concurrent and probe is not None
        self.stream, self.beside = torch.cuda.Stream(), torch.cuda.Stream()
        self.calls, self.refused = 0, False
        self.graphs: _Recorded | None = None
        self.is_probe_due = False  # for the last call

    def __call__(self, inputs: Tensor, targets: Tensor) -> Measured:
        self.calls += 1
        if self.calls == 1:
            self.inputs, self.targets = inputs.clone(), targets.clone()
        self.inputs.copy_(inputs, non_blocking=True)
        self.targets.copy_(targets, non_blocking=True)
        if self.graphs is None and self.calls > WARM_UP and not self.refused:
            self.record()
        if self.graphs is not None:
            return self.replay(self.graphs)
        with on(self.stream):
            measured = self.update(self.inputs, self.targets)
        if self.probe is not None:
            with on(self.beside):
                measured = measured._replace(probe=self.probe())
        return measured

    def replay(self, graphs: _Recorded) -> Measured:
        """Launch the step, concurrently with the probe of the previous step."""
        if self.is_probe_due:
            now = torch.cuda.current_stream()
            self.beside.wait_stream(now)
            with torch.cuda.stream(self.beside):
                graphs.probe.replay()
            graphs.gradients.replay()
            now.wait_stream(self.beside)
        else:
            graphs.gradients.replay()
        graphs.apply.replay()
        self.is_probe_due = bool(graphs.probe)
        if not self.concurrent:
            self.settle()
        return graphs.measured

    def settle(self) -> None:
        """Run the probe that was left to the next call."""
        if self.is_probe_due and self.graphs is not None:
            self.graphs.probe.replay()
        self.is_probe_due = False

    def record(self) -> None:
        """Capture the step and the probe; this launches nothing."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        cause = self.attempt(None)
        how = "CUDA graphs"
        if cause and self.parts and "out of memory" in str(cause):
            how += f" of {LAYERS} layers each"
            cause = self.attempt(self.parts)
        if cause is None:
            self.notify(f"captured a step as {how} in {time.perf_counter() - began:.1f} s")
        elif not self.required:
            self.refused = True
            why = str(cause).splitlines()[0]
            self.notify(f"kernels are launched one by one; a step cannot be captured: {why}")
        elif isinstance(cause, torch.OutOfMemoryError):
            raise cause from None
        else:
            raise ResourceError(
                f"a step could not be captured as a CUDA graph: {cause}\n"
                "to launch kernel by kernel: runtime.cuda_graph=false"
            ) from cause

    def attempt(self, parts: Parts | None) -> BaseException | None:
        """Capture the step and the probe; return None, or the error that prevented it."""
        # the probe runs concurrently with the step and must not share its memory
        pools = [torch.cuda.graph_pool_handle() for _ in range(2)]
        random = torch.cuda.get_rng_state()
        graphs = Graphs()
        try:
            first, measurements = capture_graphs(
                lambda: self.update.gradients(self.inputs, self.targets),
                pools[0], self.stream, parts,
            )  # fmt: skip
            graphs += first
            second, measured = capture_graphs(
                lambda: self.update.apply(*measurements), pools[0], self.stream
            )
            graphs += second
            third = Graphs()
            if self.probe is not None:
                third, values = capture_graphs(self.probe, pools[1], self.beside, parts)
                measured = measured._replace(
                    probe=values, settle=weakly(self.settle) if self.concurrent else None
                )
        except RuntimeError as error:
            abandon(pools, random)
            graphs.reset()
            free_frames(error)
            return error.__context__ or error  # what went wrong first, inside of the capture
        self.graphs = _Recorded(first, second, third, measured)
        return None


class PassMemory:
    """The memory of the graphs of passes, which run one after the other on one stream."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.renew()

    def renew(self) -> None:
        """Take another pool; a failed capture has given the old one back."""
        self.pool = torch.cuda.graph_pool_handle()


class CapturedPass:
    """A function of one tensor that replays a CUDA graph, one for each shape of its inputs.

    The first call of a shape captures and replays.  If the capture fails, the call runs kernel by
    kernel, with the same bits, and so do all calls after ATTEMPTS failures.  The tensors of a
    result belong to the graph; the next call overwrites them.

    function: inputs -> nested tensors; must not wait for the device, and create no state that
        stays.
    notify: receives the reason of the last failure.
    memory: shared by passes that never run at the same time.
    warm_up: a small function with the same kernels.  Libraries initialize in it, since they cannot
        while a graph is captured.
    """

    def __init__(
        self,
        function: Callable[[Tensor], Any],
        memory: PassMemory,
        notify: Callable[[str], None],
        warm_up: Callable[[Tensor], object] | None = None,
    ) -> None:
        self.function, self.memory, self.notify = function, memory, notify
        self.warm_up, self.failures = warm_up, 0
        self.captured: dict[torch.Size, tuple[Tensor, Graphs, Any]] = {}

    def __call__(self, inputs: Tensor) -> Any:
        if inputs.shape not in self.captured and self.failures < ATTEMPTS:
            self.capture(inputs)
        if inputs.shape not in self.captured:
            return self.function(inputs)
        own, graphs, results = self.captured[inputs.shape]
        own.copy_(inputs)
        graphs.replay()
        return results

    def capture(self, inputs: Tensor) -> None:
        """Capture the function for inputs of this shape; this launches nothing."""
        if self.warm_up is not None:
            with on(self.memory.stream):
                self.warm_up(inputs)
            self.warm_up = None
        own, random = inputs.clone(), torch.cuda.get_rng_state()
        torch.cuda.synchronize()
        try:
            graphs, results = capture_graphs(
                lambda: self.function(own), self.memory.pool, self.memory.stream
            )
        except RuntimeError as error:
            abandon([self.memory.pool], random)
            free_frames(error)
            self.memory.renew()
            self.failures += 1
            cause = error.__context__ or error  # the first error, inside of the capture
            if self.failures == ATTEMPTS:
                why = str(cause).splitlines()[0]
                self.notify(f"kernels of a pass are launched one by one; it is not captured: {why}")
            return
        self.captured[inputs.shape] = own, graphs, results

    def release(self) -> None:
        """Free the graphs and their memory, and forget the function, which may hold a run."""
        for _, graphs, _ in self.captured.values():
            graphs.reset()
        self.captured.clear()
        del self.function


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a call of the bound method by weak reference; no effect once its object is freed."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (bound := reference()) is not None:
            bound()

    return call


@contextmanager
def on(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run on `stream`, ordered after earlier and before later work of the current stream."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def capture_graphs(
    function: Callable[[], Any], pool: Any, stream: torch.cuda.Stream, parts: Parts | None = None
) -> tuple[Graphs, Any]:
    """Capture the function in memory of the pool; return its graphs and its result.

    One graph, or one for each part: parts share the pool's memory, since they are only launched in
    sequence.
    """
    graphs = Graphs()
    try:
        # The outer context leaves the capturing stream where the capture itself fails.
        with torch.cuda.stream(torch.cuda.current_stream()), ExitStack() as inside:

            def begin() -> None:
                join()
                inside.close()
                graphs.append(torch.cuda.CUDAGraph())
                inside.enter_context(torch.cuda.graph(graphs[-1], pool=pool, stream=stream))

            begin()
            if parts is None:
                result = function()
            else:
                # a capture ends in the thread in which it began, in the backward pass too
                with torch.autograd.set_multithreading_enabled(False), parts(LAYERS, begin):
                    result = function()
    except RuntimeError:
        graphs.reset()
        raise
    return graphs, result


def free_frames(error: BaseException | None) -> None:
    """Free the objects in an error's frames, such as activations, and keep its traceback."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def abandon(pools: Sequence[Any], random: Tensor) -> None:
    """Do the cleanup that torch omits after a failed capture.

    Without it torch keeps the pools' memory, and every random number raises an error.

    random: the generator's state before the capture.
    """
    device, inside = torch.cuda.current_device(), vars(torch._C)
    end = inside.get("_cuda_endAllocateToPool") or inside["_cuda_endAllocateCurrentStreamToPool"]
    for pool in pools:
        with suppress(RuntimeError):  # nothing is put into the pool any more
            end(device, pool)
            inside["_cuda_releasePool"](device, pool)
    fresh = torch.Generator(torch.device("cuda", device))
    fresh.set_state(random)
    torch.cuda.default_generators[device].graphsafe_set_state(fresh.graphsafe_get_state())
