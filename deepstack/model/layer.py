"""A layer: its sublayers, joined to the stream by its scheme."""

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
    the encoder's output are given it as `memory`, (batch, source, d_model).  `running` and `whole`
    belong to the fast paths: functions that compute the same as the sublayers, and one that
    computes the same as the whole layer where nothing reads a memory.
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
        """The sublayers as modules."""
        return tuple(getattr(self, name) for name in self.names)

    def forward(self, x: Stream, memory: Tensor | None = None) -> Stream:
        if self.whole is not None and memory is None:
            return self.whole(x)
        return self.scheme.layer(x, *self.given(memory))

    def given(self, memory: Tensor | None) -> tuple[Sublayer, ...]:
        """The sublayers as functions of the stream alone."""
        if memory is None:
            return self.running
        pairs = zip(self.running, self.readers, strict=True)
        return tuple(partial(G, memory=memory) if reads else G for G, reads in pairs)

    @contextmanager
    def unfused(self) -> Iterator[None]:
        """Run sublayers and norms as modules inside of the block."""
        before = self.running, self.whole, self.scheme.norm_functions
        self.running, self.whole = self.modules_in_order(), None
        self.scheme.call_norms(None)
        try:
            yield
        finally:
            self.running, self.whole, self.scheme.norm_functions = before
