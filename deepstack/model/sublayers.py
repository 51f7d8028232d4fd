"""The two sublayers of an encoder layer: self-attention and feed-forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.speed import parameter

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "gelu": F.gelu}


class Attention(nn.Module):
    """G(x) = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h · W_oᵀ + b_o, [q, k, v] = x W_qkvᵀ + b.

    x: (batch, seq, d_model).  W_q, W_k, W_v, W_o: (d_model, d_model), applied as x Wᵀ.  One product
    computes q, k and v; with fused=False the three matrices are parameters of their own (which an
    optimizer can treat apart) and are put together first, so that the numbers are the same.
    Vaswani et al. 2017, arXiv:1706.03762, section 3.2.
    """

    def __init__(self, d_model: int, n_heads: int, dropout: float, *, fused: bool = True) -> None:
        super().__init__()
        self.n_heads, self.dropout, self.fused = n_heads, dropout, fused
        if fused:
            self.qkv = parameter(3 * d_model, d_model, role=("q", "k", "v"), start="matrix")
        else:
            self.q = parameter(d_model, d_model, role="q", start="matrix")
            self.k = parameter(d_model, d_model, role="k", start="matrix")
            self.v = parameter(d_model, d_model, role="v", start="matrix")
        self.qkv_bias = parameter(3 * d_model, role="bias", start="zero")
        self.o = parameter(d_model, d_model, role="o", start="matrix")
        self.o_bias = parameter(d_model, role="bias", start="zero")

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, d = x.shape
        weight = self.qkv if self.fused else torch.cat([self.q, self.k, self.v])
        # Products are of matrices: flattened once, they need no view of their own going back.
        qkv = F.linear(x.flatten(0, 1), weight, self.qkv_bias)  # (batch * seq, 3 d)
        heads = qkv.view(batch, seq, 3, self.n_heads, d // self.n_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, head, seq, d_head)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        y = F.linear(y.transpose(1, 2).reshape(-1, d), self.o, self.o_bias).view(batch, seq, d)
        return F.dropout(y, rate) if rate else y


class FeedForward(nn.Module):
    """G(x) = phi(x W_1ᵀ + b_1) W_2ᵀ + b_2, phi the activation.

    x: (batch, seq, d_model); W_1: (d_ff, d_model); W_2: (d_model, d_ff).
    Vaswani et al. 2017, arXiv:1706.03762, section 3.3.
    """

    def __init__(self, d_model: int, d_ff: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.activation, self.dropout = ACTIVATIONS[activation], dropout
        self.w1 = parameter(d_ff, d_model, role="w1", start="matrix")
        self.w1_bias = parameter(d_ff, role="bias", start="zero")
        self.w2 = parameter(d_model, d_ff, role="w2", start="matrix")
        self.w2_bias = parameter(d_model, role="bias", start="zero")

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(F.linear(x.flatten(0, 1), self.w1, self.w1_bias))
        y = F.linear(hidden, self.w2, self.w2_bias).view(x.shape)  # hidden: (batch * seq, d_ff)
        return F.dropout(y, self.dropout) if self.dropout and self.training else y
