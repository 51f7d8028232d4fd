"""LayerNorm and RMSNorm on a GPU: alone, or one node with the sublayer and the sum before them.

In the second form one kernel adds, normalises and writes the copy in half precision that the next
sublayer reads under autocast, and one kernel does the same in the backward pass.  Gradients of gain
and bias are deferred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.fast.fused_sublayers import gradient_of
from deepstack.fast.gpu.available import kernels
from deepstack.fast.gpu.deferred_gradients import Deferred, add_rows, running_queue
from deepstack.fast.gpu.sublayer import DeviceSublayer


class DeviceNorm:
    """LN(z) = g * (z - mean(z)) / sqrt(var(z) + eps) + b.  z: (…, d); g, b: (d,), or None.

    rms: g * z / sqrt(mean(z^2) + eps) + b instead.
    """

    def __init__(
        self,
        gain: nn.Parameter | None,
        bias: nn.Parameter | None,
        width: int,
        eps: float,
        rms: bool = False,
    ) -> None:
        self.shape, self.eps, self.rms = (width,), eps, rms
        self.parameters = gain, bias
        self.gain, self.bias = (None if p is None else p.detach() for p in (gain, bias))
        self.gain_grad, self.bias_grad = gradient_of(gain), gradient_of(bias)

    def __call__(self, z: Tensor) -> Tensor:
        z = z.float()
        if self.kernels() is None or not (torch.is_grad_enabled() and z.requires_grad):
            return self.by_torch(z)
        return _Norm.apply(z, self)  # type: ignore[no-untyped-call]

    def by_torch(self, z: Tensor) -> Tensor:
        """Return the norm of z by torch's kernels."""
        gain, bias = self.parameters
        if not self.rms:
            return torch.layer_norm(z, self.shape, gain, bias, self.eps)
        y = torch.rms_norm(z, self.shape, gain, self.eps)
        return y if bias is None else y + bias

    def kernels(self) -> Any:
        """Return the kernels for norms if a row fits into a tile, else None."""
        module = kernels("norm_kernels")
        return module if module and self.shape[0] <= module.WIDEST else None

    def add_gradients_later(self, sums: Tensor) -> None:
        """Add the gradients of gain and bias, sums over the first axis of (programs, 2, d)."""
        if self.gain_grad is not None or self.bias_grad is not None:
            running_queue().add(add_norms, self, sums)


def add_norms(deferred: Sequence[Deferred]) -> None:
    """Add the deferred gradients of the gains and biases of many norms."""
    gains, biases = torch.stack([sums for _, (sums,) in deferred]).sum(1).unbind(1)
    add_rows([norm.gain_grad for norm, _ in deferred], gains)
    add_rows([norm.bias_grad for norm, _ in deferred], biases)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, norm: DeviceNorm) -> Tensor:
        normed = norm.kernels().normed(z, norm.gain, norm.bias, norm.eps, rms=norm.rms)
        ctx.save_for_backward(*normed.saved)
        ctx.norm = norm
        out: Tensor = normed.out
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        norm = ctx.norm
        dz, _, sums = norm.kernels().normed_backward(
            dout, ctx.saved_tensors, norm.gain, rms=norm.rms
        )
        norm.add_gradients_later(sums)
        return dz, None


class FusedSum:
    """x <- norm(a x + G(x)) as one node: (batch, seq, d) -> the same, in fp32.

    scale: a function that returns a.
    """

    def __init__(
        self, sublayer: DeviceSublayer, norm: DeviceNorm, scale: Callable[[], float | None]
    ) -> None:
        self.sublayer, self.norm, self.scale = sublayer, norm, scale

    def __call__(self, x: Tensor, half: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the new x and its copy in half precision under autocast, or None.

        half: such a copy of the given x, or None.
        """
        if torch.is_grad_enabled():
            out, copy = _Sum.apply(x, half, self)  # type: ignore[no-untyped-call]
            return out, copy
        return self.forward(x, half, [], save=False).out, None

    def forward(self, x: Tensor, half: Tensor | None, saved: list[Tensor], save: bool) -> Any:
        """Return the `Normed` sum; append to `saved` the tensors that the sublayer saves."""
        y = self.sublayer.forward(x if half is None else half, saved)
        copy = y.dtype if save and y.dtype is not x.dtype else None
        norm = self.norm
        return norm.kernels().normed(
            x, norm.gain, norm.bias, norm.eps,
            plus=y, scale=self.scale(), copy=copy, save=save, rms=norm.rms,
        )  # fmt: skip

    def backward(self, dout: Tensor, saved: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the gradient of x.  saved: by the sublayer, then z, mean, rstd; dtype: of G(x)."""
        *inside, z, mean, rstd = saved
        norm, sublayer = self.norm, self.sublayer
        dx, dy, sums = norm.kernels().normed_backward(
            dout, (z, mean, rstd), norm.gain, scale=self.scale(), plus=dtype, rms=norm.rms
        )
        norm.add_gradients_later(sums[:, :2])
        width = z.shape[-1]
        known = None if sublayer.out.defers(z.numel() // width) else sums[:, 2]
        sublayer.backward(dy, inside, sums=known, add_to=dx.view(-1, width))
        gradient: Tensor = dx
        return gradient


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, half: Tensor | None, fused_sum: FusedSum
    ) -> tuple[Tensor, Tensor | None]:
        saved: list[Tensor] = []
        normed = fused_sum.forward(x, half, saved, True)
        ctx.save_for_backward(*saved, *normed.saved)
        ctx.set_materialize_grads(False)  # no zeros as the gradient of the copy
        ctx.fused_sum, ctx.dtype = fused_sum, x.dtype if normed.copy is None else normed.copy.dtype
        if normed.copy is not None:
            ctx.mark_non_differentiable(normed.copy)
        return normed.out, normed.copy

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Tensor, None, None]:
        return ctx.fused_sum.backward(dout, list(ctx.saved_tensors), ctx.dtype), None, None


class FusedLayer:
    """A layer as one node for each sublayer with its sum and norm: (batch, seq, d) -> the same."""

    def __init__(self, sums: Sequence[FusedSum]) -> None:
        self.sums = sums

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x, None)[0]

    def run(self, x: Tensor, half: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the new x and its copy in half precision, as `FusedSum` does."""
        for fused_sum in self.sums:
            x, half = fused_sum(x, half)
        return x, half
