"""A layer: sublayers that a scheme joins to the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from deepstack.model.cross_attention import CrossAttention, MergedAttention
from deepstack.schemes import Scheme, Stream, Sublayer


class Layer(nn.Module):
    """x_l = scheme(x_{l-1}, attention, [cross-attention,] feed-forward).

    sublayers: name -> module, in the order in which the stream passes them.  Sublayers that read
    the encoder's output receive it as `memory`, (batch, source, d_model).  The fast paths set
    `running` and `whole`: functions equivalent to the sublayers, and one equivalent to the whole
    layer if no sublayer reads a memory.
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
        self.whole: Callable[[Tensor], Tensor] | None = None

    def modules_in_order(self) -> tuple[nn.Module, ...]:
        """Return the sublayers as modules."""
        return tuple(getattr(self, name) for name in self.names)

    def forward(self, x: Stream, memory: Tensor | None = None) -> Stream:
        if self.whole is not None and memory is None:
            return self.whole(x)
        return self.scheme.layer(x, *self.bind_memory(memory))

    def bind_memory(self, memory: Tensor | None) -> tuple[Sublayer, ...]:
        """Return the sublayers as functions of the stream alone, bound to `memory`."""
        if memory is None:
            return self.running
        pairs = zip(self.running, self.readers, strict=True)
        return tuple(partial(G, memory=memory) if reads else G for G, reads in pairs)

    @contextmanager
    def unfused(self) -> Iterator[None]:
        """Run sublayers and norms as modules inside the block, without fast paths."""
        before = self.running, self.whole, self.scheme.norm_functions
        self.running, self.whole = self.modules_in_order(), None
        self.scheme.call_norms(None)
        try:
            yield
        finally:
            self.running, self.whole, self.scheme.norm_functions = before
