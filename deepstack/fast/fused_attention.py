"""Self-attention of a `FusedSublayer` on a CPU: by torch's flash kernel or by batched products.

torch's kernel is made for long sequences and keeps no attention weights.  Over short sequences
batched products by oneDNN take half of its time, and less in bf16, with the softmax in fp32.  They
save 0.13 of a step in bf16 at 24 layers of width 256, and 0.05 in fp32.  In bf16 the kernel takes
two to four times as long as in fp32, so it computes in fp32.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from deepstack.fast.products import LARGE_PRODUCT, Library, product_functions
from deepstack.schemes.norms import in_fp32, in_full_precision

aten = torch.ops.aten


class SelfAttention:
    """y = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h.  [q, k, v]: (tokens, 3 d); y: (tokens, d).

    causal: a position reads itself and earlier ones.  library: of products (see `products`).
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
