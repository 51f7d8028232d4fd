"""Records values of every layer and sublayer during one forward and one backward pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.model import Transformer
from deepstack.model.cross_attention import CrossAttention, MergedAttention
from deepstack.model.sublayers import Attention
from deepstack.schemes import Scheme, Tap


@dataclass
class SublayerValues:
    """One call of a scheme's `residual`.

    x, G, z: (batch, seq, d), the sublayer's input, the branch's output, the last norm's input;
    norm: that norm; sums: whether the sublayer returns the norm's output and its branch reads x
    itself, so that z can be alpha x + G(x).
    deltas: name -> 0-d, norms of the loss's gradient over the whole probe batch: 'in' by x (through
    all its uses), 'sum' by the residual sum, 'norm_in' by the last norm's input (through the norm
    alone), 'norm_out' by its output.
    """

    x: Tensor
    G: Tensor | None = None
    z: Tensor | None = None
    norm: nn.Module | None = None
    sums: bool = False
    deltas: dict[str, Tensor] = field(default_factory=dict)


DELTAS = ("in", "sum", "norm_in", "norm_out")


@dataclass
class StackValues:
    """Values recorded from one stack.

    states: the stream at every layer boundary, x_0 first, each (batch, seq, d).
    sublayers: in the order of the forward pass.
    attention: sublayer -> mean entropy and largest logit by layer, (2,).
    nodes: those of the graph that have hooks, see `free_graph`.
    """

    states: list[Tensor] = field(default_factory=list)
    sublayers: list[SublayerValues] = field(default_factory=list)
    attention: dict[str, list[Tensor]] = field(default_factory=dict)
    nodes: list[Any] = field(default_factory=list)


def free_graph(seen: Mapping[str, StackValues]) -> None:
    """Free the graph node by node from its end, once its last tensors are freed.

    A node with a hook is a Python object that frees its predecessor recursively.  With ten thousand
    layers that overflows the stack of the process.  `nodes` holds each, so it is freed alone.
    """
    for one in reversed(list(seen.values())):
        while one.nodes:
            one.nodes.pop()


@contextmanager
def record_values(model: Transformer) -> Iterator[dict[str, StackValues]]:
    """Record the values of every `residual` of a stack, while the block runs its plain layers.

    The symbols of a scheme's equation are the arguments of its `residual`: x on entry, G(…), and
    input and output of the last norm of the sublayer.
    """
    seen = {side: StackValues() for side in model.stacks}
    with ExitStack() as block:
        for layer in model.layers:
            # the gradients and the gain and epsilon of norms are needed
            block.enter_context(layer.unfused())
            values = seen[layer.scheme.place.side]
            block.enter_context(tapped([layer.scheme], SublayerTap(values)))
            for name, module in zip(layer.names, layer.modules_in_order(), strict=True):
                block.callback(record_attention(module, values.attention.setdefault(name, [])))
        yield seen


@contextmanager
def tapped(schemes: Sequence[Scheme], tap: Tap) -> Iterator[None]:
    """Let these schemes pass their values through the tap inside of the block."""
    for scheme in schemes:
        scheme.tap = tap
    try:
        yield
    finally:
        for scheme in schemes:
            scheme.tap = None


class SublayerTap(Tap):
    """Record x, G, the last norm's input and the gradients by them, for each call of `residual`."""

    def __init__(self, seen: StackValues) -> None:
        self.seen = seen

    def _record_gradient(self, name: str, y: Tensor) -> None:
        if y.requires_grad:
            deltas = self.here.deltas  # without `self`, which has tensors with a graph
            y.register_hook(lambda g: deltas.update({name: torch.linalg.vector_norm(g)}))
            self.seen.nodes.append(y.grad_fn)

    def enter(self, x: Tensor) -> None:
        self.x, self.here = x, SublayerValues(x.detach())
        self.branch_inputs: list[Tensor] = []
        self.norm_input: Tensor | None = None
        self.norm_output: Tensor | None = None
        self.seen.sublayers.append(self.here)
        self._record_gradient("in", x)

    def branch(self, G: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        out = G(y)
        self.here.G = out.detach()
        self.branch_inputs.append(y)
        return out

    def norm(self, norm: Callable[[Tensor], Tensor], z: Tensor, last: bool) -> Tensor:
        if not last:
            return norm(z)
        z = z.view_as(z)  # so that the gradient by z is that of the norm alone
        self.here.z = z.detach()
        self.here.norm = norm if isinstance(norm, nn.Module) else None
        self._record_gradient("norm_in", z)
        out = norm(z)
        self._record_gradient("norm_out", out)
        self.norm_input, self.norm_output = z, out
        return out

    def leave(self, x: Tensor) -> None:
        ends_in_norm = x is self.norm_output
        reads_x = len(self.branch_inputs) == 1 and self.branch_inputs[0] is self.x
        self.here.sums = ends_in_norm and reads_x
        if x.shape == self.x.shape:  # else x is not the stream that G is added to
            total = self.norm_input if ends_in_norm else x
            assert total is not None
            self._record_gradient("sum", total)
        # A tensor kept here would keep the graph of the layers before it, see `free_graph`.
        del self.x, self.here, self.branch_inputs, self.norm_input, self.norm_output


def record_attention(module: nn.Module, values: list[Tensor]) -> Callable[[], None]:
    """Make an attention append `entropy_and_largest`; return a function that undoes it.

    The logits come from the q and k, or the logits, that the forward pass itself computes.
    """
    if not isinstance(module, (Attention, CrossAttention, MergedAttention)):
        return lambda: None
    causal = isinstance(module, Attention) and module.causal

    def record_logits(slot: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        values.append(entropy_and_largest(output[0].detach(), causal))

    def record_product(q: Tensor, k: Tensor) -> None:
        logits = torch.matmul(q.detach() * q.shape[-1] ** -0.5, k.detach().transpose(-1, -2))
        values.append(entropy_and_largest(logits, causal))

    if "logits" in module.slots:
        return module.slots["logits"].register_forward_hook(record_logits).remove
    module.listener = record_product
    return partial(setattr, module, "listener", None)


def entropy_and_largest(logits: Tensor, causal: bool) -> Tensor:
    """Return the mean entropy −Σ_j p_j ln p_j in nats, p = softmax(logits), and the largest logit.

    The mean is over sequences, heads and positions.  (2,)
    """
    if causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(future, float("-inf"))
    entropy = torch.special.entr(torch.softmax(logits, dim=-1)).sum(dim=-1).mean()
    return torch.stack([entropy, logits.max()])
