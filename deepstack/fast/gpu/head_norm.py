"""Norms of queries and keys on a GPU, between the product and the attention of a fused sublayer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepstack.fast.fused_sublayers import gradient_of
from deepstack.fast.gpu.available import kernels
from deepstack.fast.gpu.deferred_gradients import Deferred, add_rows, running_queue
from deepstack.fast.gpu.products import Gradient
from deepstack.fast.gpu.sublayer import DeviceAttention
from deepstack.model.query_key import QueriesAndKeys
from deepstack.schemes.norms import LayerNorm, RMSNorm


class DeviceHeadNorm:
    """h -> norm(h) for every head h of q and k, in [q, k, v], (tokens, 3 d), by one kernel.

    norms: the norm of q and the norm of k, which differ in gain and bias, (d_head,) each, or None.
    """

    def __init__(self, norms: Sequence[LayerNorm | RMSNorm], n_heads: int) -> None:
        self.n_heads, self.eps = n_heads, norms[0].eps
        self.rms = isinstance(norms[0], RMSNorm)
        gains, biases = [norm.gain for norm in norms], [norm.bias for norm in norms]
        self.gains, self.biases = (
            [p.detach() for p in ps if p is not None] for ps in (gains, biases)
        )
        self.gain_grads, self.bias_grads = ([gradient_of(p) for p in ps] for ps in (gains, biases))

    def forward(self, x: Tensor, saved: list[Tensor]) -> Tensor:
        """Return [q, k, v] with normed heads of q and k, in the precision of x."""
        gain, bias = (torch.stack(ps) if ps else None for ps in (self.gains, self.biases))
        normed = kernels("norm_kernels").normed(
            self.by_head(x), gain, bias, self.eps, rms=self.rms, heads=self.n_heads
        )
        saved += normed.saved
        if gain is not None:
            saved.append(gain)
        out: Tensor = normed.out
        return out.view(x.shape)

    def backward(self, dy: Tensor, saved: list[Tensor]) -> Tensor:
        """Return the gradient of [q, k, v] before the norms."""
        gain = saved.pop() if self.gains else None
        rstd, mean, z = saved.pop(), saved.pop(), saved.pop()
        dx, _, sums = kernels("norm_kernels").normed_backward(
            self.by_head(dy), (z, mean, rstd), gain, rms=self.rms, heads=self.n_heads
        )
        if any(grad is not None for grad in (*self.gain_grads, *self.bias_grads)):
            running_queue().add(add_head_norms, self, sums)
        gradient: Tensor = dx
        return gradient.view(dy.shape)

    def by_head(self, x: Tensor) -> Tensor:
        """Return x, (tokens, 3 d), as (tokens, 3 heads, d_head)."""
        return x.contiguous().view(len(x), 3 * self.n_heads, -1)


def add_head_norms(deferred: Sequence[Deferred]) -> None:
    """Add the deferred gradients of gains and biases of the norms of q and of k in many layers."""
    sums = torch.stack([sums for _, (sums,) in deferred]).sum(1).unbind(1)
    for i, (gains, biases) in enumerate((sums[:2], sums[2:])):
        add_rows([norm.gain_grads[i] for norm, _ in deferred], gains)
        add_rows([norm.bias_grads[i] for norm, _ in deferred], biases)


class NormedAttention(DeviceAttention):
    """An attention that norms the heads of queries and keys before it."""

    def __init__(self, norm: DeviceHeadNorm, causal: bool) -> None:
        super().__init__(norm.n_heads, causal)
        self.norm = norm

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        return super().forward(self.norm.forward(x, saved), seq, saved)

    def backward_with_sums(
        self, dy: Gradient, seq: int, saved: list[Tensor], wants_sums: bool
    ) -> Gradient:
        gradient = super().backward_with_sums(dy, seq, saved, wants_sums=False)
        return Gradient(self.norm.backward(gradient.value, saved))


def attention_of(qk: QueriesAndKeys | None, n_heads: int, causal: bool) -> DeviceAttention | None:
    """Return the attention with norms of queries and keys, or None without a kernel for them."""
    if qk is None:
        return DeviceAttention(n_heads, causal)
    if not has_head_kernels(qk):
        return None
    norms: list[Any] = [qk.q_norm, qk.k_norm]
    return NormedAttention(DeviceHeadNorm(norms, n_heads), causal)


def has_head_kernels(qk: QueriesAndKeys) -> bool:
    """Return whether these are norms without rotation, and there are kernels for them."""
    is_known = all(type(norm) in (LayerNorm, RMSNorm) for norm in (qk.q_norm, qk.k_norm))
    return is_known and qk.rotation is None and kernels("norm_kernels") is not None
