"""The two sublayers that every layer has: self-attention and feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.speed import OPERATIONS, Chain, Product, RoleParameter, SelfAttention, parameter

# relu; gelu(z) = z Phi(z), exact; selu: Klambauer et al. 2017, arXiv:1706.02515
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "selu": F.selu,
}


Slots = Mapping[str, nn.Module]
"""What a scheme puts inside of a sublayer, by the place where it goes:

| slot             | of           | is given                                                      |
|------------------|--------------|---------------------------------------------------------------|
| q, k, v          | attention    | queries, keys, values, (batch, head, seq, d_head)             |
| heads            | attention    | the heads' outputs, (batch, head, seq, d_head)                |
| before_out       | attention    | them side by side, (batch * seq, d_model), before W_o         |
| before_cross_out | cross-attention | the same there                                             |
| before_activation | feed-forward | x W_1ᵀ + b_1, (batch * seq, d_ff)                            |
| after_activation | feed-forward | the hidden values, (batch * seq, d_ff), before W_2            |
"""


class Attention(nn.Module):
    """G(x) = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h · W_oᵀ + b_o, [q, k, v] = x W_qkvᵀ + b.

    x: (batch, seq, d_model).  W_q, W_k, W_v, W_o: (d_model, d_model), applied as x Wᵀ.  One product
    computes q, k and v; with fused=False the three matrices are parameters of their own (which an
    optimizer can treat apart) and are put together first, so that the numbers are the same.
    bias=False: there is no b and no b_o.  causal: a position reads itself and those before it.
    Vaswani et al. 2017, arXiv:1706.03762, section 3.2.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        dropout: float,
        *,
        fused: bool = True,
        bias: bool = True,
        causal: bool = False,
        slots: Slots | None = None,
    ) -> None:
        super().__init__()
        self.n_heads, self.dropout, self.fused, self.causal = n_heads, dropout, fused, causal
        self.slots = taken(slots, ("q", "k", "v", "heads", "before_out"))
        if fused:
            self.qkv = parameter(3 * d_model, d_model, role=("q", "k", "v"), start="matrix")
        else:
            self.q = parameter(d_model, d_model, role="q", start="matrix")
            self.k = parameter(d_model, d_model, role="k", start="matrix")
            self.v = parameter(d_model, d_model, role="v", start="matrix")
        self.qkv_bias = bias_of(3 * d_model, bias)
        self.o = parameter(d_model, d_model, role="o", start="matrix")
        self.o_bias = bias_of(d_model, bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, d = x.shape
        weight = self.qkv if self.fused else torch.cat([self.q, self.k, self.v])
        # Products are of matrices: flattened once, they need no view of their own going back.
        qkv = F.linear(x.flatten(0, 1), weight, self.qkv_bias)  # (batch * seq, 3 d)
        heads = qkv.view(batch, seq, 3, self.n_heads, d // self.n_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, head, seq, d_head)
        slots = self.slots
        if "q" in slots:
            q, k, v = slots["q"](q), slots["k"](k), slots["v"](v)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=self.causal)
        if "heads" in slots:
            y = slots["heads"](y)
        y = y.transpose(1, 2).reshape(-1, d)
        if "before_out" in slots:
            y = slots["before_out"](y)
        y = F.linear(y, self.o, self.o_bias).view(batch, seq, d)
        return F.dropout(y, rate) if rate else y

    def chain(self) -> Chain | None:
        """The same as one node of the backward pass, or None where it is not that."""
        if self.dropout or self.slots or not self.fused or not SelfAttention.available:
            return None
        into, out = Product(self.qkv, self.qkv_bias), Product(self.o, self.o_bias)
        return Chain([into, SelfAttention(self.n_heads, self.causal), out])


class FeedForward(nn.Module):
    """G(x) = phi(x W_1ᵀ + b_1) W_2ᵀ + b_2, phi the activation.

    x: (batch, seq, d_model); W_1: (d_ff, d_model); W_2: (d_model, d_ff).  bias=False: no b_1, b_2.
    Vaswani et al. 2017, arXiv:1706.03762, section 3.3.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: str,
        dropout: float,
        *,
        bias: bool = True,
        slots: Slots | None = None,
    ) -> None:
        super().__init__()
        self.slots = taken(slots, ("before_activation", "after_activation"))
        self.activation, self.dropout = ACTIVATIONS[activation], dropout
        self.operation = OPERATIONS.get(activation)  # None: no chain
        self.w1 = parameter(d_ff, d_model, role="w1", start="matrix")
        self.w1_bias = bias_of(d_ff, bias)
        self.w2 = parameter(d_model, d_ff, role="w2", start="matrix")
        self.w2_bias = bias_of(d_model, bias)

    def forward(self, x: Tensor) -> Tensor:
        slots = self.slots
        hidden = F.linear(x.flatten(0, 1), self.w1, self.w1_bias)
        if "before_activation" in slots:
            hidden = slots["before_activation"](hidden)
        hidden = self.activation(hidden)
        if "after_activation" in slots:
            hidden = slots["after_activation"](hidden)
        y = F.linear(hidden, self.w2, self.w2_bias).view(x.shape)  # hidden: (batch * seq, d_ff)
        return F.dropout(y, self.dropout) if self.dropout and self.training else y

    def chain(self) -> Chain | None:
        """The same as one node of the backward pass, or None where it is not that."""
        if self.dropout or self.slots or self.operation is None:
            return None
        into, out = Product(self.w1, self.w1_bias), Product(self.w2, self.w2_bias)
        return Chain([into, self.operation, out])


def bias_of(width: int, there: bool) -> RoleParameter | None:
    """The bias of a linear map, (width,), or None where the stack has none."""
    return parameter(width, role="bias", start="zero") if there else None


def taken(slots: Slots | None, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """What goes into these slots; a plain dict, since the scheme is what owns it."""
    return {name: slots[name] for name in names if slots is not None and name in slots}
