"""LayerNorm on a GPU: alone, or as one autograd node with the sublayer and the sum before it.

In the second form one kernel adds and normalises, and one kernel does the same in the backward
pass.  Gradients of gain and bias are deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.fast.fused_sublayers import FusedSublayer, gradient_of
from deepstack.fast.gpu.available import kernels
from deepstack.fast.gpu.deferred_gradients import Deferred, add_rows, defer


class DeviceNorm:
    """LN(z) = g * (z - mean(z)) / sqrt(var(z) + eps) + b.  z: (…, d); g, b: (d,), or None."""

    def __init__(
        self, gain: nn.Parameter | None, bias: nn.Parameter | None, width: int, eps: float
    ) -> None:
        self.shape, self.eps = (width,), eps
        self.parameters = gain, bias
        self.gain, self.bias = (None if p is None else p.detach() for p in (gain, bias))
        self.gain_grad, self.bias_grad = gradient_of(gain), gradient_of(bias)

    def __call__(self, z: Tensor) -> Tensor:
        z = z.float()
        if self.kernels() is None or not (torch.is_grad_enabled() and z.requires_grad):
            return torch.layer_norm(z, self.shape, *self.parameters, self.eps)
        return _Norm.apply(z, self)  # type: ignore[no-untyped-call]

    def kernels(self) -> Any:
        """Return the kernels for norms if a row fits into a tile, else None."""
        module = kernels("norm_kernels")
        return module if module and self.shape[0] <= module.WIDEST else None

    def add_gradients_later(self, sums: Tensor) -> None:
        """Add the gradients of gain and bias, sums over the first axis of (programs, 2, d)."""
        if self.gain_grad is not None or self.bias_grad is not None:
            defer(add_norms, self, sums)


def add_norms(deferred: Sequence[Deferred]) -> None:
    """Add the deferred gradients of the gains and biases of many norms."""
    gains, biases = torch.stack([sums for _, (sums,) in deferred]).sum(1).unbind(1)
    add_rows([norm.gain_grad for norm, _ in deferred], gains)
    add_rows([norm.bias_grad for norm, _ in deferred], biases)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, norm: DeviceNorm) -> Tensor:
        out, saved = norm.kernels().normed(z, norm.gain, norm.bias, norm.eps)
        ctx.save_for_backward(*saved)
        ctx.norm = norm
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        norm = ctx.norm
        dz, _, sums = norm.kernels().normed_backward(dout, ctx.saved_tensors, norm.gain)
        norm.add_gradients_later(sums)
        return dz, None


class FusedSum:
    """x <- LN(a x + G(x)) as one node: (batch, seq, d) -> the same, in fp32.

    scale: a function that returns a.
    """

    def __init__(
        self, sublayer: FusedSublayer, norm: DeviceNorm, scale: Callable[[], float | None]
    ) -> None:
        self.sublayer, self.norm, self.scale = sublayer, norm, scale

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Sum.apply(x, self)  # type: ignore[no-untyped-call]
        return self.add_and_norm(x, self.sublayer.forward(x, []), save=False)[0]

    def add_and_norm(self, x: Tensor, y: Tensor, save: bool) -> tuple[Tensor, Sequence[Tensor]]:
        """Return LN(a x + y), and tensors for the backward pass if `save`."""
        norm = self.norm
        return norm.kernels().normed(
            x, norm.gain, norm.bias, norm.eps, plus=y, scale=self.scale(), save=save
        )

    def backward(self, dout: Tensor, saved: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the gradient of x.  saved: by the sublayer, then z, mean, rstd; dtype: of G(x)."""
        *inside, z, mean, rstd = saved
        norm = self.norm
        dx, dy, sums = norm.kernels().normed_backward(
            dout, (z, mean, rstd), norm.gain, scale=self.scale(), plus=dtype
        )
        norm.add_gradients_later(sums)
        return dx.add_(self.sublayer.backward(dy, inside))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fused_sum: FusedSum) -> Tensor:
        saved: list[Tensor] = []
        y = fused_sum.sublayer.forward(x, saved)
        out, more = fused_sum.add_and_norm(x, y, save=True)
        ctx.save_for_backward(*saved, *more)
        ctx.fused_sum, ctx.dtype = fused_sum, y.dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return ctx.fused_sum.backward(dout, list(ctx.saved_tensors), ctx.dtype), None
