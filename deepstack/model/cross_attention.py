"""The sublayers with which a decoder reads an encoder: cross-attention and merged attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.model.query_key import QueriesAndKeys
from deepstack.model.sublayers import Linear, Listener, Slots, bias_of, filled_slots
from deepstack.parameters import parameter


class Crossing(nn.Module):
    """The base class of both: queries of the stream and keys of the encoder's output, by head.

    qk: the norms of queries and keys; no rotation, as positions of two sequences have no distance.
    """

    SLOTS: tuple[str, ...]  # the last is the slot before W_o
    listener: Listener | None = None  # receives q and k, (batch, head, seq, d_head)
    q: Tensor
    q_bias: Tensor | None
    o: Tensor
    o_bias: Tensor | None

    def __init__(
        self,
        n_heads: int,
        dropout: float,
        linear: Linear,
        qk: QueriesAndKeys | None,
        slots: Slots | None,
    ) -> None:
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.linear = linear
        self.qk = qk
        self.slots = filled_slots(slots, self.SLOTS)

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries of the stream, (batch, head, seq, d_head)."""
        q = by_head(self.linear(x, self.q, self.q_bias), self.n_heads)
        return q if self.qk is None else self.qk.q(q)

    def keys(self, k: Tensor) -> Tensor:
        """Split keys, (batch, source, d_model), by head and norm them."""
        k = by_head(k, self.n_heads)
        return k if self.qk is None else self.qk.k(k)

    def attend(self, x: Tensor, k: Tensor, v: Tensor, mean: Tensor | None = None) -> Tensor:
        """Return G(x), given keys and values by head; `mean` is added to the joined heads."""
        q = self.queries(x)
        if self.listener is not None:
            self.listener(q, k)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate).transpose(1, 2).flatten(2)
        if mean is not None:
            y = y + mean
        slot = self.SLOTS[-1]
        if slot in self.slots:
            y = self.slots[slot](y)
        y = self.linear(y, self.o, self.o_bias)
        return F.dropout(y, rate) if rate else y


class CrossAttention(Crossing):
    """G(x) = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h · W_oᵀ + b_o, [k, v] = m W_kvᵀ + b_kv.

    q = x W_qᵀ + b_q.  x: (batch, seq, d_model); m, the encoder's output: (batch, source, d_model).
    All matrices are (d_model, d_model); one product computes k and v, or two with fused=False.
    Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3.
    """

    SLOTS = ("before_cross_out",)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        dropout: float,
        *,
        fused: bool = True,
        bias: bool = True,
        linear: Linear = F.linear,
        qk: QueriesAndKeys | None = None,
        slots: Slots | None = None,
    ) -> None:
        super().__init__(n_heads, dropout, linear, qk, slots)
        self.fused = fused
        self.q = parameter(d_model, d_model, role="cross_q", start="matrix")
        if fused:
            self.kv = parameter(2 * d_model, d_model, role=("cross_k", "cross_v"), start="matrix")
        else:
            self.k = parameter(d_model, d_model, role="cross_k", start="matrix")
            self.v = parameter(d_model, d_model, role="cross_v", start="matrix")
        self.q_bias, self.kv_bias = bias_of(d_model, bias), bias_of(2 * d_model, bias)
        self.o = parameter(d_model, d_model, role="cross_o", start="matrix")
        self.o_bias = bias_of(d_model, bias)

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of the encoder's output, each (batch, head, source, d_head)."""
        weight = self.kv if self.fused else torch.cat([self.k, self.v])
        k, v = self.linear(memory, weight, self.kv_bias).chunk(2, dim=-1)
        return self.keys(k), by_head(v, self.n_heads)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.attend(x, *self.keys_and_values(memory))


class MergedAttention(Crossing):
    """G(x) = (concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h + mean_{j <= i} u_j) W_oᵀ + b_o.

    q = x W_qᵀ + b_q and u = x W_vᵀ + b_v of the decoder's stream; k = m W_kᵀ + b_k and
    v = m W_vᵀ + b_v of the encoder's output, with the same W_v.  A position does not attend to the
    positions up to it but takes the mean of their values.  So one sublayer replaces self-attention
    and cross-attention, and decoding stores one sum instead of all keys and values.
    x: (batch, seq, d_model); m: (batch, source, d_model).  Zhang et al. 2019, arXiv:1908.11365,
    section 4.2.
    """

    SLOTS = ("before_out",)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        dropout: float,
        *,
        bias: bool = True,
        linear: Linear = F.linear,
        qk: QueriesAndKeys | None = None,
        slots: Slots | None = None,
    ) -> None:
        super().__init__(n_heads, dropout, linear, qk, slots)
        self.q = parameter(d_model, d_model, role="q", start="matrix")
        self.k = parameter(d_model, d_model, role="k", start="matrix")
        self.v = parameter(d_model, d_model, role="v", start="matrix")
        self.o = parameter(d_model, d_model, role="o", start="matrix")
        self.q_bias, self.k_bias = bias_of(d_model, bias), bias_of(d_model, bias)
        self.v_bias, self.o_bias = bias_of(d_model, bias), bias_of(d_model, bias)

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of the encoder's output, each (batch, head, source, d_head)."""
        k = self.linear(memory, self.k, self.k_bias)
        return self.keys(k), by_head(self.values(memory), self.n_heads)

    def values(self, x: Tensor) -> Tensor:
        """Return x W_vᵀ + b_v, (batch, seq, d_model)."""
        return self.linear(x, self.v, self.v_bias)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        mean = self.values(x).cumsum(dim=1) / count
        return self.attend(x, *self.keys_and_values(memory), mean)


def by_head(x: Tensor, n_heads: int) -> Tensor:
    """Split by head: (batch, seq, d_model) -> (batch, head, seq, d_head)."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)
