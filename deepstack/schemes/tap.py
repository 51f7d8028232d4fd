"""Taps: listeners to the values inside of a residual connection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch import Tensor

Residual = Callable[..., Tensor]


class Tap:
    """Receives the values of one `Scheme.residual` call after the other, in order.

    Each method may return another value than the default, which then takes the place of the
    layer's own.  A scheme calls its tap only while `scheme.tap` is set.
    """

    def enter(self, x: Tensor) -> None:
        """x: the stream that enters, (batch, seq, d_model)."""

    def branch(self, G: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        """The output of the sublayer G for the input y."""
        return G(y)

    def norm(self, norm: Callable[[Tensor], Tensor], z: Tensor, last: bool) -> Tensor:
        """The output of a norm for the input z; last: whether it is the last of its sublayer."""
        return norm(z)

    def leave(self, x: Tensor) -> None:
        """x: the stream that leaves."""


def with_tap(residual: Residual) -> Residual:
    """`residual`, which passes its values through the scheme's tap while there is one."""

    @wraps(residual)
    def run(self: Any, x: Tensor, G: Callable[..., Tensor], *norms: Any, **more: Any) -> Tensor:
        tap = self.tap
        if tap is None:
            return residual(self, x, G, *norms, **more)
        tap.enter(x)
        tapped = [partial(tap.norm, norm, last=norm is norms[-1]) for norm in norms]
        self.tap = None  # `residual` may call that of its parent class
        try:
            out = residual(self, x, partial(tap.branch, G), *tapped, **more)
        finally:
            self.tap = tap
        tap.leave(out)
        return out

    return run
