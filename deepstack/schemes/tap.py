"""A tap receives the values inside a layer while a pass runs: diagnostics and theory use it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from torch import Tensor


class Tap:
    """Receives the values inside each `Scheme.residual` call, in order.

    `branch` and `norm` return the value with which the layer continues, by default its own.  A
    scheme calls its tap only while `scheme.tap` is set.
    """

    def enter(self, x: Tensor) -> None:
        """Receive the stream x before the sublayer, (batch, seq, d_model)."""

    def branch(self, G: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
        """Return the output of the sublayer G for the input y."""
        return G(y)

    def norm(self, norm: Callable[[Tensor], Tensor], z: Tensor, last: bool) -> Tensor:
        """Return a norm's output for the input z; last: whether it is its sublayer's last norm."""
        return norm(z)

    def leave(self, x: Tensor) -> None:
        """Receive the stream x after the sublayer, (batch, seq, d_model)."""


def with_tap(residual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `residual` to pass its values through the scheme's tap while one is set."""

    @wraps(residual)
    def run(self: Any, x: Tensor, G: Callable[..., Tensor], *norms: Any, **more: Any) -> Tensor:
        tap = self.tap
        if tap is None:
            return residual(self, x, G, *norms, **more)
        tap.enter(x)
        tapped = [partial(tap.norm, norm, last=norm is norms[-1]) for norm in norms]
        self.tap = None  # `residual` may call the parent class's `residual`
        try:
            out = residual(self, x, partial(tap.branch, G), *tapped, **more)
        finally:
            self.tap = tap
        tap.leave(out)
        return out

    return run


@contextmanager
def tapped(schemes: Sequence[Any], tap: Tap) -> Iterator[None]:
    """Let these schemes pass their values through the tap inside of the block."""
    for scheme in schemes:
        scheme.tap = tap
    try:
        yield
    finally:
        for scheme in schemes:
            scheme.tap = None
