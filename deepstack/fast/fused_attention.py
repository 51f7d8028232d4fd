"""Self-attention of a `FusedSublayer` on a CPU, with norms and rotation of queries and keys.

torch's kernel is made for long sequences and keeps no attention weights.  Over short sequences
batched products by oneDNN take half of its time, and less in bf16, with the softmax in fp32.  They
save 0.13 of a step in bf16 at 24 layers of width 256, and 0.05 in fp32.  In bf16 the kernel takes
two to four times as long as in fp32, so it computes in fp32.

`HeadNorm` and `HeadRotation` work in place on [q, k, v], (tokens, 3 d), between a product and the
attention.  Without them attention with either is not fused: a replayed step with rotary positions
takes 1.16 times as long, with normed queries and keys 1.03, with both and RMSNorm 1.3.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from deepstack.fast.fused_sublayers import constant, gradient_of, inverse_root
from deepstack.fast.products import LARGE_PRODUCT, Library, product_functions
from deepstack.schemes.norms import LayerNorm, RMSNorm, in_fp32, in_full_precision

aten = torch.ops.aten


class SelfAttention:
    """y = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h.  [q, k, v]: (tokens, 3 d); y: (tokens, d).

    causal: a position reads itself and earlier ones.
    library: of products (see `products`).

    [q, k, v] is a new result of a product and may be changed.
    """

    def __init__(self, n_heads: int, causal: bool = False, library: Library = "mkl") -> None:
        self.n_heads, self.causal, self.library = n_heads, causal, library

    def forward(self, x: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        tokens, width = x.shape
        by_products = self.uses_products(x, seq)
        x = x if by_products else in_fp32(x)
        heads = x.view(tokens // seq, seq, 3, self.n_heads, width // (3 * self.n_heads))
        heads = heads.permute(2, 0, 3, 1, 4)  # q, k, v; batch, head, seq, d_head
        attend = self.by_products if by_products else self.by_flash
        with in_full_precision(x):
            return attend(heads, saved).transpose(1, 2).reshape(tokens, width // 3)

    def backward(self, dy: Tensor, seq: int, saved: list[Tensor]) -> Tensor:
        q = saved[-5]
        heads = dy.to(q.dtype).view(len(dy) // seq, seq, self.n_heads, -1).transpose(1, 2)
        by_products = q.ndim == 3
        attend = self.by_products_backward if by_products else self.by_flash_backward
        return attend(heads, saved)

    def uses_products(self, x: Tensor, seq: int) -> bool:
        """Return whether batched products are used: by oneDNN, large and of few positions.

        The attention weights, seq numbers per token and head, then stay in memory.
        """
        d = x.shape[1] // 3
        by_onednn = x.dtype is torch.bfloat16 or self.library == "onednn"
        is_short = seq <= 2 * d // self.n_heads
        return by_onednn and is_short and len(x) * seq * d >= LARGE_PRODUCT

    def bmm(self, a: Tensor, b: Tensor, **out: Tensor) -> Tensor:
        """Return batched products, of fp32 by oneDNN."""
        library: Library = "onednn" if a.dtype is torch.float32 else "mkl"
        return product_functions(library, LARGE_PRODUCT).bmm(a, b, **out)

    def by_flash(self, heads: Tensor, saved: list[Tensor]) -> Tensor:
        """Return y, (batch, head, seq, d_head), by F.scaled_dot_product_attention's kernel."""
        q, k, v = heads.unbind(0)
        attend = aten._scaled_dot_product_flash_attention_for_cpu
        y, logsumexp = attend(q, k, v, 0.0, self.causal)
        saved += (q, k, v, y, logsumexp)
        return y

    def by_flash_backward(self, dy: Tensor, saved: list[Tensor]) -> Tensor:
        """Return the gradient of [q, k, v], (tokens, 3 d)."""
        q, k, v, y, logsumexp = saved[-5:]
        del saved[-5:]
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, y, logsumexp, 0.0, self.causal
        )
        tokens = dy.shape[0] * dy.shape[2]
        return torch.cat([g.transpose(1, 2).reshape(tokens, -1) for g in gradients], dim=1)

    def by_products(self, heads: Tensor, saved: list[Tensor]) -> Tensor:
        """Return y = A v, (batch, head, seq, d_head), with A = softmax(q kᵀ / sqrt(d_head))."""
        _, batch, n_heads, seq, d_head = heads.shape
        q, k, v = heads.reshape(3, batch * n_heads, seq, d_head).unbind(0)
        q.mul_(d_head**-0.5)
        logits = self.bmm(q, k.transpose(1, 2))
        if self.causal:
            logits.masked_fill_(later_positions(seq), float("-inf"))
        weights = torch.softmax(logits, -1, dtype=torch.float32)
        rounded = weights.to(v.dtype)
        saved += (q, k, v, weights, rounded)
        return self.bmm(rounded, v).view(batch, n_heads, seq, d_head)

    def by_products_backward(self, dy: Tensor, saved: list[Tensor]) -> Tensor:
        """Return the gradient of [q, k, v], (tokens, 3 d).

        dv = Aᵀ dy; the gradient of the logits is A (dA - sum(A dA)) by row, with dA = dy vᵀ.
        """
        batch, n_heads, seq, d_head = dy.shape
        q, k, v, weights, rounded = saved[-5:]
        del saved[-5:]
        dy = dy.reshape(batch * n_heads, seq, d_head)
        dweights = in_fp32(self.bmm(dy, v.transpose(1, 2)))
        dlogits = aten._softmax_backward_data(dweights, weights, -1, torch.float32).to(q.dtype)
        gradients = torch.empty(3, batch * n_heads, seq, d_head, dtype=q.dtype)
        dq, dk, dv = gradients.unbind(0)
        self.bmm(dlogits, k, out=dq)
        dq.mul_(d_head**-0.5)
        self.bmm(dlogits.transpose(1, 2), q, out=dk)  # q has the factor already
        self.bmm(rounded.transpose(1, 2), dy, out=dv)
        by_token = gradients.view(3, batch, n_heads, seq, d_head).permute(1, 3, 0, 2, 4)
        return by_token.reshape(batch * seq, -1)


@lru_cache(maxsize=4)
def later_positions(seq: int) -> Tensor:
    """Return the mask of positions after each position, (seq, seq)."""
    with torch.inference_mode(False):
        return torch.ones(seq, seq, dtype=torch.bool).triu(1)


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

    m = mean(h) in a layer norm, 0 in an RMS norm.

    norms: the norm of q and the norm of k, which differ in g and b, (d_head,) each, or None.
    """

    def __init__(self, norms: Sequence[LayerNorm | RMSNorm], n_heads: int) -> None:
        self.n_heads, self.eps = n_heads, norms[0].eps
        self.centred = isinstance(norms[0], LayerNorm)
        gains, biases = [norm.gain for norm in norms], [norm.bias for norm in norms]
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
