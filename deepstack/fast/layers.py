"""FastPaths through the layers, x_0 -> x_N: one after the other, compiled, or with recomputation.

`memory` is what the layers of a decoder read besides the stream, an encoder's output; None for
those that read nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepstack.fast.fuse import fuse
from deepstack.fast.fused_sublayers import without_copy
from deepstack.fast.gpu.nodes import weights_lowered, weights_turned
from deepstack.fast.rule import FastPaths
from deepstack.model.stack import Layers, Through, run_layers
from deepstack.model.transformer import Transformer
from deepstack.schemes import Stream


def run_fused(layers: Layers, x: Stream, memory: Tensor | None = None) -> Stream:
    """The same for layers of chains, which have a backward pass only if x_0 asks for a gradient."""
    first = x if isinstance(x, Tensor) else x[0]
    if torch.is_grad_enabled() and not first.requires_grad:  # nothing before the layers is trained
        first.requires_grad_()
    if not first.is_cuda:
        return run_layers(layers, x, memory)
    tokens = first.shape[0] * first.shape[1]
    if torch.is_autocast_enabled("cuda"):
        prepared = weights_lowered(layers, tokens, torch.get_autocast_dtype("cuda"))
    else:
        prepared = weights_turned(layers, tokens)
    with prepared:
        return run_layers(layers, x, memory)


def recomputing(through: Through, every: int, random: bool) -> Through:
    """Keep the stream every so many layers; the backward pass computes the rest again.

    Activations of depth / every boundaries and of `every` layers are held, for one more forward
    pass.  random: whether layers draw numbers (dropout), the same ones the second time.
    Chen et al. 2016, arXiv:1604.06174, whose sqrt(depth) is the least of both together.
    """

    def run(layers: Layers, x: Stream, memory: Tensor | None = None) -> Stream:
        if not torch.is_grad_enabled():
            return through(layers, x, memory)
        for first in range(0, len(layers), every):
            part = layers[first : first + every]
            for tensor in [x] if isinstance(x, Tensor) else x:
                without_copy(tensor)  # what is kept is kept once
            x = checkpoint(through, part, x, memory, use_reentrant=False, preserve_rng_state=random)
        return x

    return run


def cut(through: Through, every: int, between: Callable[[], None]) -> Through:
    """Call `between` before every so many layers, and in the backward pass behind them."""

    def run(layers: Layers, x: Stream, memory: Tensor | None = None) -> Stream:
        for first in range(0, len(layers), every):
            between()
            once_on_the_way_back(x, between)
            x = through(layers[first : first + every], x, memory)
        return x

    return run


@contextmanager
def in_parts(model: Transformer, every: int, between: Callable[[], None]) -> Iterator[None]:
    """Inside the block `between` is called between so many layers, and on the way back."""
    with model.another_way(lambda through: cut(through, every, between)):
        yield


def enable_fast_paths(
    model: Transformer, paths: FastPaths, recompute_every: int, notify: Callable[[str], None]
) -> None:
    """Make the model run its layers by the chosen fast paths; its numbers stay the same.

    recompute_every: keep the stream every so many layers only, 0 for all.  notify: receives a line
    before something that takes long.
    """
    if paths.fused:
        fuse(model.layers)
    plain = run_fused if paths.fused else run_layers
    through = compiled(notify) if paths.compiled else plain
    model.infers = through is run_fused
    if recompute_every:
        through = recomputing(through, recompute_every, model.training)
        model.infers = False
    for stack in model.stacks.values():
        stack.through = through


def once_on_the_way_back(x: Stream, call: Callable[[], None]) -> None:
    """Call it in the backward pass, when the first gradient of the stream has come."""
    came = False

    def come(_: Tensor) -> None:
        nonlocal came
        if not came:
            came = True
            call()

    for tensor in [x] if isinstance(x, Tensor) else x:
        if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(come)


def compiled(
    said: Callable[[str], None], backend: str | Callable[..., Any] = "inductor"
) -> Through:
    """Every layer by one compiled function: torch.compile of the forward they share.

    Layers of one wiring share one graph a mode (with and without gradients): parameters are inputs
    of it, and constants that differ by layer are 0-d buffers.  said: told what is being waited for.
    """
    # torch looks whether an input has a gradient while it compiles, and warns itself of it.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    # torch allows a code object a few graphs: an encoder and a decoder that reads it have their own
    forwards: dict[
        tuple[type[nn.Module], bool], Callable[[nn.Module, Stream, Tensor | None], Stream]
    ] = {}

    def prepare(kind: type[nn.Module]) -> Callable[[nn.Module, Stream, Tensor | None], Stream]:
        said("compiling a layer; this takes up to a minute, once for all layers")
        # A code object of its own: torch keeps compiled graphs with the code and counts them, and
        # another stack of this process would use up what it allows.
        own = FunctionType(kind.forward.__code__.replace(), kind.forward.__globals__)
        return torch.compile(own, dynamic=False, fullgraph=True, backend=backend)

    def run(layers: Layers, x: Stream, memory: Tensor | None = None) -> Stream:
        for layer in layers:
            kind = type(layer), memory is None
            if kind not in forwards:
                forwards[kind] = prepare(type(layer))
            x = forwards[kind](layer, x, memory)
        return x

    return run
