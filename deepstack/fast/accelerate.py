"""Makes a model run its layers by fast paths: fused, compiled, recomputed; records its steps.

`memory` is the encoder's output, which decoder layers read besides the stream; None for others.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from deepstack import config as conf
from deepstack.fast.capture import CapturedPass, CapturedStep, PassMemory
from deepstack.fast.fuse import fuse
from deepstack.fast.fused_sublayers import half_weights, products_of
from deepstack.fast.gpu.available import makes_kernels
from deepstack.fast.gpu.norm import FusedLayer
from deepstack.fast.gpu.products import prepared_weights
from deepstack.fast.native import find_kernels
from deepstack.fast.recording import map_nested
from deepstack.fast.replay import ReplayedPass, ReplayedStep
from deepstack.fast.rule import FastPaths
from deepstack.fast.step import Probe, Update, UpdateFunction, with_probe
from deepstack.model.stack import LayerRunner, Layers, run_layers
from deepstack.model.transformer import Transformer
from deepstack.schemes import Stream

# Snapshots of a run from which on they are replayed: recording takes as long as four eager ones.
FEW_RECORDS = 8
# Compiled layers by `compiled_shape`, and the largest number of shapes that are kept.
MOST_COMPILED = 16
_compiled: dict[str, dict[Any, Callable[..., Stream]]] = {}


def run_fused(layers: Layers, x: Stream, memory: Tensor | None = None) -> Stream:
    """Run layers of fused sublayers; x_0 must require a gradient to have a backward pass."""
    first = x if isinstance(x, Tensor) else x[0]
    if torch.is_grad_enabled() and not first.requires_grad:  # nothing before the layers is trained
        first.requires_grad_()
    device = first.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    if device == "cpu":
        if half is None:
            return run_layers(layers, x, memory)
        with half_weights(list(products_of(layers)), half):
            return run_layers(layers, x, memory)
    tokens = first.shape[0] * first.shape[1]
    copy: Tensor | None = None  # of x, in half precision
    with prepared_weights(layers, tokens, half):
        for layer in layers:
            if memory is None and isinstance(
                fused_layer := getattr(layer, "layer_function", None), FusedLayer
            ):
                x, copy = fused_layer.run(x, copy)
            else:
                x, copy = layer(x, memory), None
    return x


def recomputing(runner: LayerRunner, every: int, random: bool) -> LayerRunner:
    """Keep the stream every so many layers; the backward pass recomputes the layers between.

    Activations of depth / every boundaries and of `every` layers are held, for one more forward
    pass.

    random: whether layers draw numbers (dropout), the same ones the second time.

    Chen et al. 2016, arXiv:1604.06174, whose sqrt(depth) is the least of both together.
    """

    def run(layers: Layers, x: Stream, memory: Tensor | None = None) -> Stream:
        if not torch.is_grad_enabled():
            return runner(layers, x, memory)
        for first in range(0, len(layers), every):
            part = layers[first : first + every]
            x = checkpoint(runner, part, x, memory, use_reentrant=False, preserve_rng_state=random)
        return x

    return run


@contextmanager
def in_parts(model: Transformer, every: int, between: Callable[[], None]) -> Iterator[None]:
    """Call `between` between every so many layers, forward and backward, inside the block."""

    def cut(runner: LayerRunner) -> LayerRunner:
        def run(layers: Layers, x: Stream, memory: Tensor | None = None) -> Stream:
            for first in range(0, len(layers), every):
                between()
                before = [x] if isinstance(x, Tensor) else x
                tensors = [t for t in before if isinstance(t, Tensor) and t.requires_grad]
                if tensors and torch.is_grad_enabled():  # once, at the first of their gradients
                    register_multi_grad_hook(tensors, lambda _: between(), mode="any")
                x = runner(layers[first : first + every], x, memory)
            return x

        return run

    with model.replace_runner(cut):
        yield


def enable_fast_paths(
    model: Transformer,
    paths: FastPaths,
    notify: Callable[[str], None],
    config: conf.Config | None = None,
) -> None:
    """Make the model run its layers by the chosen fast paths; its numbers stay the same.

    notify: receives a line before something that takes long.
    config: of the run, whose batches may have parts and whose layers other runs may share.
    """
    on_gpu = model.embedding.is_cuda
    if paths.fused:
        fuse(model.layers, paths.products)
        for product in products_of(model.layers):
            product.adds_parts = config is not None and config.train.parts > 1
        if on_gpu and makes_kernels():
            notify("Triton makes kernels; seconds, once on a machine")
    if paths.compiled and on_gpu:  # tell torch's compiler too
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())
    plain = run_fused if paths.fused else run_layers
    shape = "" if config is None else compiled_shape(config)
    runner = compiled(notify, shape) if paths.compiled else plain
    model.infers = runner is run_fused and not paths.recompute_every
    if paths.recompute_every:
        runner = recomputing(runner, paths.recompute_every, model.training)
    for stack in model.stacks.values():
        stack.runner = runner


def compiled(notify: Callable[[str], None], shape: str = "") -> LayerRunner:
    """Return a function that runs every layer by torch.compile of the forward they share.

    Equal layers share one graph per mode (with and without gradients).  Its inputs are parameters,
    and constants that differ by layer are 0-d buffers.

    notify: receives a line before a compilation.
    shape: a key of the layers: later runs of this process with an equal one use the same graphs.
        '' compiles anew.
    """
    # While compiling, torch reads the gradients of inputs and warns about its own access.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    known: dict[Any, Callable[..., Stream]] = _compiled.setdefault(shape, {}) if shape else {}
    while len(_compiled) > MOST_COMPILED:
        del _compiled[next(iter(_compiled))]

    def prepare(kind: Any, reads_memory: bool) -> Callable[..., Stream]:
        notify("compiling a layer; this takes up to a minute, once for all layers")
        # A new code object: another stack of this process would use up the limit of this one.
        forward = FunctionType(kind.forward.__code__.replace(), kind.forward.__globals__)
        return torch.compile(forward, dynamic=False, fullgraph=True)

    def run(layers: Layers, x: Stream, memory: Tensor | None = None) -> Stream:
        for layer in layers:
            key = type(layer), memory is not None  # torch limits the graphs of a code object
            if key not in known:
                known[key] = prepare(*key)
            x = known[key](layer, x, memory)
        return x

    return run


def compiled_shape(config: conf.Config) -> str:
    """Return a key of all settings on which the graphs of compiled layers depend."""
    train, task = config.train, config.task
    batches = train.batch_size, train.parts, train.eval_batches, config.log.probe_sequences
    return repr((config.model, task, batches, train.precision, config.runtime.deterministic))


class PassRecorder:
    """Makes the passes of a run that are not steps as fast as its steps: replayed, or captured.

    notify: receives why a pass cannot be captured.
    threads: of the run, which replay a pass.
    """

    def __init__(
        self, paths: FastPaths, threads: int, notify: Callable[[str], None] = lambda line: None
    ) -> None:
        self.paths, self.threads, self.notify = paths, threads, notify
        self.memory = PassMemory() if paths.captured else None
        self.captured: list[CapturedPass] = []

    def forward(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return a forward pass without gradients, replayed where C++ kernels replay steps."""
        kernels = find_kernels(lambda line: None) if self.paths.executor else ""
        if not isinstance(kernels, str):
            return ReplayedPass(function, kernels, self.threads)
        return self.capture(function)

    def snapshot(
        self,
        passes: Callable[[Tensor], Any],
        records: int,
        warm_up: Callable[[Tensor], object] | None = None,
    ) -> Callable[[Tensor], Any]:
        """Return the passes of a snapshot, replayed where there are enough records.

        records: number of snapshots of the whole run.
        warm_up: the passes of a shallow model, see `CapturedPass`.

        Diagnostics may keep the tensors of the result.
        """
        fast = self.capture(passes, warm_up)
        if self.paths.replayed and records >= FEW_RECORDS:
            kernels = find_kernels(lambda line: None) if self.paths.executor else None
            assert not isinstance(kernels, str), kernels
            fast = ReplayedPass(passes, kernels, self.threads)
        if fast is passes:
            return passes
        return lambda tokens: map_nested(fast(tokens), torch.clone)  # the next call overwrites them

    def capture(
        self,
        function: Callable[[Tensor], Any],
        warm_up: Callable[[Tensor], object] | None = None,
    ) -> Callable[[Tensor], Any]:
        """Return the function, captured if steps are; see `CapturedPass`."""
        if self.memory is None:
            return function
        self.captured.append(CapturedPass(function, self.memory, self.notify, warm_up))
        return self.captured[-1]

    def release(self) -> None:
        """Free the graphs of captured passes."""
        for one in self.captured:
            one.release()


def step_recorder(
    model: Transformer,
    config: conf.Config,
    paths: FastPaths,
    notify: Callable[[str], None],
    threads: int,
) -> Callable[[Update, Probe | None], UpdateFunction]:
    """Return `capture` of `make_step`: CUDA graph capture, replay, or neither.

    notify: receives a line after something that takes long.
    threads: of the run, which replay a step.
    """
    if paths.replayed:
        kernels = find_kernels(notify) if paths.executor else None
        assert not isinstance(kernels, str), kernels
        return partial(
            ReplayedStep,
            notify=notify,
            threads=threads,
            kernels=kernels,
            concurrent=config.train.shards > 1 and not config.model.dropout,
        )
    if paths.captured:
        return partial(
            CapturedStep,
            notify=notify,
            required=config.runtime.cuda_graph is True,
            concurrent=not model.schemes[0].changes_by_step,
            parts=partial(in_parts, model),
        )
    return with_probe
