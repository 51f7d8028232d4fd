"""RMSNorm as an operation of a `FusedSublayer`, for narrow stacks on a CPU.

torch composes an RMS norm of some six operations, and its backward pass of twice as many: a
replayed step takes 1.05 times as long.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor, nn

from deepstack.fast.fused_sublayers import gradient_of

aten = torch.ops.aten


class RootMeanSquare:
    """RMSNorm(z) = g * z / r + b, r = sqrt(mean(z^2) + eps).  z: (tokens, d); g, b: (d,), or None.

    With u = g dy and n = z / r, dz = (u - n mean(u n)) / r.  The backward pass of a layer norm with
    a mean of 0 gives (u - mean(u) - n mean(u n)) / r, and the sums for g and b.
    """

    def __init__(
        self, gain: nn.Parameter | None, bias: nn.Parameter | None, width: int, eps: float
    ) -> None:
        self.shape, self.eps = (width,), eps
        self.gain, self.bias = (None if p is None else p.detach() for p in (gain, bias))
        self.grads = [gradient_of(p) for p in (gain, bias)]

    def forward(self, z: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        scale = inverse_root(z, self.eps)
        saved += (z, scale)
        y = z * scale
        if self.bias is None:
            return y if self.gain is None else y.mul_(self.gain)
        return y.add_(self.bias) if self.gain is None else torch.addcmul(self.bias, y, self.gain)

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        scale, z = saved.pop(), saved.pop()
        dz, *sums = aten.native_layer_norm_backward(
            dy, z, self.shape, constant(0.0, scale.shape, z.dtype), scale, self.gain, self.bias,
            [True, *(grad is not None for grad in self.grads)],
        )  # fmt: skip
        for grad, sum_ in zip(self.grads, sums, strict=True):
            if grad is not None:
                grad.add_(sum_)
        total = dy.sum(1) if self.gain is None else torch.mv(dy, self.gain)
        return dz.add_(total[:, None].mul_(scale), alpha=1 / self.shape[0])


def inverse_root(z: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(z^2) + eps), (…, 1), over the last axis of z, (…, d)."""
    length = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    least = constant(eps, (), z.dtype)
    return torch.addcmul(least, length, length, value=1 / z.shape[-1]).rsqrt_()


@lru_cache(maxsize=16)
def constant(value: float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor filled with one number, which all layers share."""
    with torch.inference_mode(False):
        return torch.full(shape, value, dtype=dtype, device="cpu")
