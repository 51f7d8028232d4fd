"""Operations on the heads of q, k and v on a GPU, between a product and the attention.

They are the norms of queries and keys, their rotation and the repetition of grouped heads.  Every
operation takes one kernel and one pass over memory in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepstack.fast.fused_sublayers import Operation, gradient_of
from deepstack.fast.gpu.available import kernels
from deepstack.fast.gpu.deferred_gradients import Deferred, add_rows, running_queue
from deepstack.fast.gpu.products import Gradient
from deepstack.fast.gpu.sublayer import DeviceAttention
from deepstack.model.attention import Attention
from deepstack.model.query_key import Rotation
from deepstack.schemes.norms import LayerNorm, RMSNorm, norm_with_kernels


class DeviceHeadNorm:
    """h -> norm(h) for every head h of q and k, in [q, k, v], (tokens, n), by one kernel.

    norms: the norm of q and the norm of k, which differ in gain and bias, (d_head,) each, or None.
    n_heads: of q.  n_kv_heads: of k, and of v.
    """

    def __init__(self, norms: Sequence[LayerNorm | RMSNorm], n_heads: int, n_kv_heads: int) -> None:
        self.n_heads, self.n_kv_heads, self.eps = n_heads, n_kv_heads, norms[0].eps
        self.rms = isinstance(norms[0], RMSNorm)
        gains, biases = [norm.gain for norm in norms], [norm.bias for norm in norms]
        self.gains, self.biases = (
            [p.detach() for p in ps if p is not None] for ps in (gains, biases)
        )
        self.gain_grads, self.bias_grads = ([gradient_of(p) for p in ps] for ps in (gains, biases))

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        """Return [q, k, v] with normed heads of q and k, in the precision of x."""
        gain, bias = (torch.stack(ps) if ps else None for ps in (self.gains, self.biases))
        normed = kernels("norm_kernels").normed(
            self.by_head(x), gain, bias, self.eps,
            rms=self.rms, heads=self.n_heads, keys=self.n_kv_heads,
        )  # fmt: skip
        saved += normed.saved
        if gain is not None:
            saved.append(gain)
        out: Tensor = normed.out
        return out.view(x.shape)

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        """Return the gradient of [q, k, v] before the norms."""
        gain = saved.pop() if self.gains else None
        rstd, mean, z = saved.pop(), saved.pop(), saved.pop()
        dx, _, sums = kernels("norm_kernels").normed_backward(
            self.by_head(dy), (z, mean, rstd), gain,
            rms=self.rms, heads=self.n_heads, keys=self.n_kv_heads,
        )  # fmt: skip
        if any(grad is not None for grad in (*self.gain_grads, *self.bias_grads)):
            running_queue().add(add_head_norms, self, sums)
        gradient: Tensor = dx
        return gradient.view(dy.shape)

    def by_head(self, x: Tensor) -> Tensor:
        """Return x, (tokens, n), as (tokens, n_heads + 2 n_kv_heads, d_head)."""
        return x.contiguous().view(len(x), self.n_heads + 2 * self.n_kv_heads, -1)


def add_head_norms(deferred: Sequence[Deferred]) -> None:
    """Add the deferred gradients of gains and biases of the norms of q and of k in many layers."""
    sums = torch.stack([sums for _, (sums,) in deferred]).sum(1).unbind(1)
    for i, (gains, biases) in enumerate((sums[:2], sums[2:])):
        add_rows([norm.gain_grads[i] for norm, _ in deferred], gains)
        add_rows([norm.bias_grads[i] for norm, _ in deferred], biases)


class ArrangedHeads:
    """[q, k, v], (tokens, n) -> [R q, R k, v], (tokens, 3 d), by one kernel; R the rotation.

    A head of k or v is repeated for all heads of q that read it.

    n_heads: of q.  n_kv_heads: of k, and of v.
    rotation: None for none.
    """

    def __init__(self, n_heads: int, n_kv_heads: int, rotation: Rotation | None) -> None:
        self.heads, self.rotation = (n_heads, n_kv_heads), rotation

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        y: Tensor = kernels("head_kernels").arranged(x, *self.heads, self.angles(), seq)
        return y

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        arrange = kernels("head_kernels").arranged_backward
        dx: Tensor = arrange(dy, *self.heads, self.angles(), seq)
        return dx

    def angles(self) -> tuple[Tensor, Tensor] | None:
        """Return the cosines and sines of the rotation, (seq_len, d_head) each, or None."""
        return (self.rotation.cos, self.rotation.sin) if self.rotation is not None else None


class PreparedAttention(DeviceAttention):
    """An attention after operations on the heads of q, k and v."""

    def __init__(self, operations: Sequence[Operation], n_heads: int, causal: bool) -> None:
        super().__init__(n_heads, causal)
        self.operations = operations

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        for operation in self.operations:
            x = operation.forward(x, seq, saved)
        return super().forward(x, seq, saved)

    def backward_with_sums(
        self, dy: Gradient, seq: int, saved: list[Tensor], wants_sums: bool
    ) -> Gradient:
        dx = super().backward_with_sums(dy, seq, saved, wants_sums=False).value
        for operation in reversed(self.operations):
            dx = operation.backward(dx, seq, saved)
        return Gradient(dx)


def attention_of(module: Attention) -> DeviceAttention | None:
    """Return the attention of a module with its operations, or None without kernels for them."""
    if not has_head_kernels(module):
        return None
    n_heads, n_kv_heads, qk = module.n_heads, module.n_kv_heads, module.qk
    operations: list[Operation] = []
    norms = [n for one in (qk.q_norm, qk.k_norm) if (n := norm_with_kernels(one))] if qk else []
    if norms:
        operations.append(DeviceHeadNorm(norms, n_heads, n_kv_heads))
    rotation = qk.rotation if qk else None
    if rotation is not None or n_kv_heads != n_heads:
        operations.append(ArrangedHeads(n_heads, n_kv_heads, rotation))
    if operations:
        return PreparedAttention(operations, n_heads, module.causal)
    return DeviceAttention(n_heads, module.causal)


def has_head_kernels(module: Attention) -> bool:
    """Return whether there are kernels for the norms, rotation and groups of this attention."""
    qk = module.qk
    if qk is None and module.n_kv_heads == module.n_heads:
        return True  # it needs none
    is_known = qk is None or all(n is None or norm_with_kernels(n) for n in (qk.q_norm, qk.k_norm))
    return is_known and kernels("head_kernels") is not None
