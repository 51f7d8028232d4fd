"""A layer: its sublayers, joined to the stream by its scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from deepstack.model.cross_attention import CrossAttention, MergedAttention
from deepstack.model.sublayers import Attention, FeedForward
from deepstack.schemes import Scheme, Stream, Sublayer
from deepstack.speed import AfterSum, after_sum


class Layer(nn.Module):
    """x_l = scheme(x_{l-1}, attention, [cross-attention,] feed-forward).

    sublayers: name -> module, in the order in which the stream passes them.  `running`: what stands
    for them: the modules themselves, or their chains (`fuse`); `nodes`: those that are one with the
    sum and the norm after them, in place of the scheme's own words.  Sublayers that read the
    encoder's output are given it as `memory`, (batch, source, d_model).
    """

    def __init__(self, scheme: Scheme, sublayers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.scheme = scheme
        for name, module in sublayers.items():
            setattr(self, name, module)
        self.names = tuple(sublayers)
        self.readers = tuple(
            isinstance(m, (CrossAttention, MergedAttention)) for m in sublayers.values()
        )
        self.running: tuple[Callable[..., Tensor], ...] = self.modules_in_order()
        self.nodes: tuple[AfterSum, ...] = ()

    def modules_in_order(self) -> tuple[nn.Module, ...]:
        """The sublayers as modules."""
        return tuple(getattr(self, name) for name in self.names)

    def forward(self, x: Stream, memory: Tensor | None = None) -> Stream:
        if self.nodes and memory is None:
            for node in self.nodes:
                x = node(x)
            return x
        return self.scheme.layer(x, *self.given(memory))

    def given(self, memory: Tensor | None) -> tuple[Sublayer, ...]:
        """The sublayers as functions of the stream alone."""
        if memory is None:
            return self.running
        pairs = zip(self.running, self.readers, strict=True)
        return tuple(partial(G, memory=memory) if reads else G for G, reads in pairs)

    def fuse(self, on: bool = True) -> None:
        """Run sublayers as one node each where they can be (see `deepstack.speed.Chain`)."""
        modules = self.modules_in_order()
        self.running = tuple(
            (m.chain() if on and isinstance(m, (Attention, FeedForward)) else None) or m
            for m in modules
        )
        self.scheme.bind_norms(on)
        self.nodes = ()
        if on and self.scheme.post_scale() is not None:
            each = zip(self.running, self.scheme._norms, strict=True)
            nodes = [after_sum(G, norm, self.scheme.post_scale) for G, (norm,) in each]
            self.nodes = tuple(node for node in nodes if node) if all(nodes) else ()

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Run sublayers and norms as modules inside of the block."""
        before = self.running, self.nodes, self.scheme._norms
        self.fuse(False)
        try:
            yield
        finally:
            self.running, self.nodes, self.scheme._norms = before
