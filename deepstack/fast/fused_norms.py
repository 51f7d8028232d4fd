"""RMSNorm, and norms and rotation of queries and keys, as operations of a `FusedSublayer` on a CPU.

torch composes an RMS norm of some six operations, and its backward pass of twice as many: a
replayed step takes 1.05 times as long.  `HeadNorm` and `HeadRotation` work in place on [q, k, v],
(tokens, 3 d), between a product and the attention.  Without them attention with either is not
fused: a replayed step with rotary positions takes 1.16 times as long, with normed queries and keys
1.03, with both and RMSNorm 1.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from deepstack.fast.fused_sublayers import gradient_of
from deepstack.schemes.norms import in_fp32

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


class HeadRotation:
    """(h_2i, h_2i+1) -> (h_2i + i h_2i+1) e^(i p θ_i) for every head of q and k, p the position.

    factors: e^(i p θ_i), (seq_len, d), for all heads of q and k side by side.
    """

    def __init__(self, factors: Tensor) -> None:
        self.factors, self.conjugate = factors, factors.conj().resolve_conj()

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        return rotate(in_fp32(x), self.factors[:seq])

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        return rotate(dy, self.conjugate[:seq])


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply the first d pairs of numbers of x, (tokens, 3 d), as complex numbers, in place."""
    seq, d = factors.shape
    pairs = torch.view_as_complex(x.view(-1, seq, 3 * d // 2, 2)[:, :, :d])
    pairs.mul_(factors)
    return x


class HeadNorm:
    """h -> g * n + b, n = (h - m) / sqrt(mean((h - m)^2) + eps), for every head h of q and k.

    centred: m = mean(h), a layer norm; otherwise m = 0, an RMS norm.  gains, biases: g and b of q
    and of k, (d_head,) each, or None.
    """

    def __init__(
        self,
        gains: Sequence[nn.Parameter | None],
        biases: Sequence[nn.Parameter | None],
        *,
        n_heads: int,
        eps: float,
        centred: bool,
    ) -> None:
        self.n_heads, self.eps, self.centred = n_heads, eps, centred
        self.gains, self.biases = (
            [p.detach() for p in ps if p is not None] for ps in (gains, biases)
        )
        self.gain_grads, self.bias_grads = ([gradient_of(p) for p in ps] for ps in (gains, biases))

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        x = in_fp32(x)
        qk = queries_and_keys(x)
        flat = torch.cat([qk], dim=1)  # a contiguous copy
        n = flat.view(len(flat), 2 * self.n_heads, -1)
        if self.centred:
            n.sub_(n.sum(-1, keepdim=True), alpha=1 / n.shape[-1])
        scale = inverse_root(n, self.eps)
        n.mul_(scale)
        saved += (n, scale)
        gain, bias = self.for_all_heads(self.gains), self.for_all_heads(self.biases)
        if gain is not None:
            saved.append(gain)
        if gain is not None and bias is not None:
            torch.addcmul(bias, flat, gain, out=qk)
        elif gain is not None:
            torch.mul(flat, gain, out=qk)
        else:
            qk.copy_(flat if bias is None else flat + bias)
        return x

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        gain = saved.pop() if self.gains else None
        scale, n = saved.pop(), saved.pop()
        dqk = queries_and_keys(dy)
        self.add_sums(dqk, self.bias_grads)
        self.add_sums(dqk * n.view(dqk.shape), self.gain_grads)
        dn = (torch.cat([dqk], dim=1) if gain is None else dqk * gain).view(n.shape)
        if self.centred:  # n is normalised: the layer norm of n has mean 0 and rstd 1
            mean, rstd = (constant(value, scale.shape, n.dtype) for value in (0.0, 1.0))
            dn, _, _ = aten.native_layer_norm_backward(
                dn, n, n.shape[-1:], mean, rstd, None, None, [True, False, False]
            )
        else:
            dn.addcmul_(n, (dn * n).sum(-1, keepdim=True), value=-1 / n.shape[-1])
        dqk.copy_(dn.mul_(scale).view(dqk.shape))
        return dy

    def for_all_heads(self, vectors: list[Tensor]) -> Tensor | None:
        """Repeat q's and k's vectors, (d_head,) each, over all heads: (2 d,), or None."""
        return torch.cat([p for p in vectors for _ in range(self.n_heads)]) if vectors else None

    def add_sums(self, terms: Tensor, grads: Sequence[Tensor | None]) -> None:
        """Add sums over tokens and heads to the gradients of q's and of k's."""
        if any(grad is not None for grad in grads):
            sums = terms.sum(0).view(2, self.n_heads, -1).sum(1)
            for grad, sum_ in zip(grads, sums.unbind(), strict=True):
                if grad is not None:
                    grad.add_(sum_)


def queries_and_keys(x: Tensor) -> Tensor:
    """Return [q, k], (tokens, 2 d), a view of [q, k, v]."""
    return x[:, : 2 * x.shape[1] // 3]
