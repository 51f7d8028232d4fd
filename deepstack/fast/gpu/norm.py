"""Layer norms of a stack on a GPU, alone or as one node with the sublayer and the sum before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepstack.fast.fused_sublayers import FusedSublayer, copy_of, with_copy
from deepstack.fast.gpu.available import norm_kernels
from deepstack.fast.gpu.deferred_gradients import add_rows, later
from deepstack.fast.gpu.nodes import DeviceProduct

aten = torch.ops.aten


class DeviceNorm:
    """LN(z) = g * (z - mean(z)) / sqrt(var(z) + eps) + b, whose weights' gradients may come later.

    z: (…, d); g, b: (d,), or None.  Under autocast what it gives has a copy in bf16.
    """

    def __init__(
        self, gain: nn.Parameter | None, bias: nn.Parameter | None, width: int, eps: float
    ) -> None:
        self.shape, self.eps = (width,), eps
        self.gain, self.bias = (None if p is None else p.detach() for p in (gain, bias))
        self.gain_grad, self.bias_grad = (
            p.grad if p is not None and p.requires_grad else None for p in (gain, bias)
        )

    def __call__(self, z: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and z.requires_grad):
            return torch.layer_norm(z, self.shape, self.gain, self.bias, self.eps)
        out: Tensor
        if self.kernels() is None:
            out = _Normed.apply(z.float(), self)
            return out
        out, copy = _NormedByKernels.apply(z.float(), self)
        return with_copy(out, copy)

    def kernels(self) -> Any:
        """Kernels for rows as long as these, or None."""
        found = norm_kernels()
        return found if found and self.shape[0] <= found.WIDEST else None

    def leave(self, sums: Tensor) -> None:
        """Add the gradients of gain and bias, sums over the first axis of (programs, 2, d)."""
        if self.gain_grad is not None or self.bias_grad is not None:
            later(self, sums)

    @staticmethod
    def add_together(left: Sequence[tuple[DeviceNorm, tuple[Tensor, ...]]]) -> None:
        """The same of many."""
        gains, biases = torch.stack([sums for _, (sums,) in left]).sum(1).unbind(1)
        add_rows([norm.gain_grad for norm, _ in left], gains)
        add_rows([norm.bias_grad for norm, _ in left], biases)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, norm: DeviceNorm) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(z, norm.shape, norm.gain, norm.bias, norm.eps)
        ctx.save_for_backward(z, mean, rstd)
        ctx.norm = norm
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        norm = ctx.norm
        grads = norm.gain_grad, norm.bias_grad
        dz, *found = aten.native_layer_norm_backward(
            dy, ctx.saved_tensors[0], norm.shape, *ctx.saved_tensors[1:], norm.gain, norm.bias,
            [True, *(grad is not None for grad in grads)],
        )  # fmt: skip
        for grad, sum_ in zip(grads, found, strict=True):
            if grad is not None:
                grad.add_(sum_)
        return dz, None


class _NormedByKernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, norm: DeviceNorm) -> tuple[Tensor, Any]:
        half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        found = norm.kernels().normed(z, norm.gain, norm.bias, norm.eps, copy=half)
        ctx.save_for_backward(*found.saved)
        ctx.set_materialize_grads(False)  # no zeros as the gradient of the copy
        ctx.norm = norm
        if found.copy is not None:
            ctx.mark_non_differentiable(found.copy)
        return found.out, found.copy

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Tensor, None]:
        norm = ctx.norm
        dz, _, sums = norm.kernels().normed_backward(dout, ctx.saved_tensors, norm.gain)
        norm.leave(sums)
        return dz, None


class AfterSum:
    """x <- LN(a x + G(x)) as one node, G a chain: (batch, seq, d) -> the same, in fp32.

    scale: a function that gives a.  One kernel adds, norms and makes the copy in bf16 that the next
    chain reads under autocast; one does the same on the way back, where the chain's last product
    adds to the gradient of a x.
    """

    def __init__(
        self, chain: FusedSublayer, norm: DeviceNorm, scale: Callable[[], float | None]
    ) -> None:
        self.chain, self.norm, self.scale = chain, norm, scale

    def __call__(self, x: Tensor) -> Tensor:
        copy = copy_of(x)
        if torch.is_grad_enabled():
            out: Tensor
            out, half = _AfterSum.apply(x, copy, self)
            return with_copy(out, half)
        return self.forward(x, copy, [], save=False).out

    def forward(self, x: Tensor, copy: Tensor | None, saved: list[Tensor], save: bool) -> Any:
        """LN(a x + G(x)) and what the way back needs, what the chain needs of it in `saved`."""
        y = self.chain.forward(x if copy is None else copy, saved)
        half = y.dtype if save and y.dtype is not x.dtype else None
        norm = self.norm
        return norm.kernels().normed(
            x, norm.gain, norm.bias, norm.eps, plus=y, scale=self.scale(), copy=half, save=save
        )

    def backward(self, dout: Tensor, saved: list[Tensor], kind: torch.dtype) -> Tensor:
        """The gradient of x.  saved: of the chain, then z, mean and rstd; kind: what G gave."""
        *inside, z, mean, rstd = saved
        norm, operations = self.norm, self.chain.backwards
        dx, dy, sums = norm.kernels().normed_backward(
            dout, (z, mean, rstd), norm.gain, scale=self.scale(), plus=kind
        )
        norm.leave(sums[:, :2])
        last = operations[0]
        if isinstance(last, DeviceProduct) and not last.waits(z.numel() // z.shape[-1]):
            last.take_bias(sums[:, 2])
        seq, width = dout.shape[-2:]
        stream, dy = dx.view(-1, width), dy.view(-1, width)
        for operation in operations[:-1]:
            dy = operation.backward(dy, seq, inside)
        first = operations[-1]
        assert isinstance(first, DeviceProduct)
        first.backward(dy, seq, inside, into=stream)
        found: Tensor = dx
        return found


class _AfterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copy: Tensor | None, node: AfterSum) -> tuple[Tensor, Any]:
        saved: list[Tensor] = []
        found = node.forward(x, copy, saved, True)
        ctx.save_for_backward(*saved, *found.saved)
        ctx.set_materialize_grads(False)  # no zeros as the gradient of the copy
        ctx.node, ctx.kind = node, x.dtype if found.copy is None else found.copy.dtype
        if found.copy is not None:
            ctx.mark_non_differentiable(found.copy)
        return found.out, found.copy

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Any) -> tuple[Tensor, None, None]:
        return ctx.node.backward(dout, list(ctx.saved_tensors), ctx.kind), None, None


def after_sum(chain: Any, norm: Any, scale: Callable[[], float | None]) -> AfterSum | None:
    """A sublayer, the sum after it and the norm after that as one node, or None if they cannot."""
    if not (isinstance(chain, FusedSublayer) and isinstance(norm, DeviceNorm)):
        return None
    begins = isinstance(chain.operations[0], DeviceProduct)
    return AfterSum(chain, norm, scale) if begins and norm.kernels() else None
