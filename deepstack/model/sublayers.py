"""The two sublayers of every layer: self-attention and feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.model.query_key import QueriesAndKeys
from deepstack.parameters import RoleParameter, parameter

# relu; gelu(z) = z Phi(z), exact; selu: Klambauer et al. 2017, arXiv:1706.02515; silu(z) =
# z sigmoid(z); relu2(z) = relu(z)^2: So et al. 2021, arXiv:2109.08668
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "selu": F.selu,
    "silu": F.silu,
    "relu2": lambda z: torch.relu(z).square(),
}


Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function that applies a matrix, (x, W, b) -> y: `F.linear`, or `scaled_linear` under NTK."""


def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return y = x Wᵀ / sqrt(n_in) + b.  x: (…, n_in), W: (n_out, n_in), b: (n_out,) or None.

    The NTK parameterisation, for a W whose entries have variance gain^2.  Compare Xavier with
    'fan: in', of variance gain^2 / n_in.  Here y starts equal, the entries of W are sqrt(n_in)
    times as large, and the gradient by W is 1/sqrt(n_in) as large.  So a step of SGD moves y by
    1/n_in as much.  Jacot et al. 2018, arXiv:1806.07572, section 2.
    """
    scale = weight.shape[1] ** -0.5
    if bias is None:
        return F.linear(x, weight) * scale
    y = torch.addmm(bias, x.flatten(0, -2), weight.t(), alpha=scale)
    return y.view(*x.shape[:-1], len(bias))


Listener = Callable[[Tensor, Tensor], None]
Keep = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Slots = Mapping[str, nn.Module]
"""The modules of a scheme that run inside a sublayer, by slot:

| slot             | sublayer     | input (the output replaces it)                                |
|------------------|--------------|---------------------------------------------------------------|
| q, k, v          | attention    | queries, keys, values, (batch, head, seq, d_head)             |
| logits           | attention    | q kᵀ / sqrt(d_head), (batch, head, seq, seq), and the tensor  |
|                  |              | passed on by the layer before, of that shape, or None;        |
|                  |              | returns the softmax's input and the tensor to pass on         |
| mixed_values     | attention    | values, (batch, head, seq, d_head), and the tensor passed on  |
|                  |              | by the layer before, of that shape, or None; returns the      |
|                  |              | values to weight and the tensor to pass on                    |
| heads            | attention    | the heads' outputs, (batch, head, seq, d_head)                |
| before_out       | attention    | concatenated heads, (batch * seq, d_model), before W_o        |
| before_cross_out | cross-attention | the same in cross-attention                                |
| w1               | feed-forward | W_1 and b_1 (or None); with a gate, W_3 and b_3 below them;   |
|                  |              | returns the matrix and the bias to apply                      |
| before_activation | feed-forward | x W_1ᵀ + b_1, (batch * seq, d_ff)                            |
| after_activation | feed-forward | the hidden values, (batch * seq, d_ff), before W_2            |
"""


class Attention(nn.Module):
    """G(x) = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h · W_oᵀ + b_o, [q, k, v] = x W_qkvᵀ + b.

    x: (batch, seq, d_model).  W_q, W_k, W_v, W_o: (d_model, d_model), applied as x Wᵀ.  One product
    computes q, k and v.  With fused=False the three matrices are separate parameters (for separate
    optimizer settings); they are concatenated first, so the values are the same.
    bias=False: there is no b and no b_o.  causal: a position reads itself and those before it.
    linear: the function that applies matrices.  qk: norms and rotation of q and k, after the slots.
    A scheme that fills the slot `logits` or `mixed_values` calls `attend_after`.  Vaswani et al.
    2017, arXiv:1706.03762, section 3.2.
    """

    SLOTS = ("q", "k", "v", "logits", "mixed_values", "heads", "before_out")
    listener: Listener | None = None  # receives q and k, (batch, head, seq, d_head)

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        dropout: float,
        *,
        fused: bool = True,
        bias: bool = True,
        causal: bool = False,
        linear: Linear = F.linear,
        qk: QueriesAndKeys | None = None,
        slots: Slots | None = None,
    ) -> None:
        super().__init__()
        self.n_heads, self.dropout, self.fused, self.causal = n_heads, dropout, fused, causal
        self.linear = linear
        self.qk = qk
        self.slots = filled_slots(slots, self.SLOTS)
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
        return self.out(self.attend(*self.project(x), self.causal))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """Return the heads' outputs, (batch, head, seq, d_head)."""
        if self.listener is not None:
            self.listener(q, k)
        rate = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=causal)

    def attend_after(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return G(x), which also depends on `before`, and the tensor for the next layer.

        before: the tensor from the layer before, None in the first layer; the slot `logits` or
        `mixed_values` combines it with this layer's.  Logits are (batch, head, seq, seq) for all
        pairs of positions, without a causal mask, so that they are finite; values are (batch, head,
        seq, d_head).
        """
        y, handed = self.attend_given(*self.project(x), before, self.causal)
        return self.out(y), handed

    def attend_given(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        before: Tensor | None,
        causal: bool,
        keep: Keep | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the heads' outputs, (batch, head, seq, d_head), and the tensor for the next layer.

        keep: when decoding one position at a time, a function that caches this position's keys and
        values and returns those of all positions so far.
        """
        mixes = "mixed_values" in self.slots
        if mixes:
            v, handed = self.slots["mixed_values"](v, before)
        k, v = keep(k, v) if keep else (k, v)
        if mixes:
            return self.attend(q, k, v, causal), handed
        return self.weigh(q, k, v, before, causal)

    def weigh(
        self, q: Tensor, k: Tensor, v: Tensor, before: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the heads' outputs, (batch, head, seq, d_head), and the logits to pass on."""
        own = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
        logits, handed = self.slots["logits"](own, before)
        if causal:
            future = torch.ones(own.shape[-2:], dtype=torch.bool, device=own.device).triu(1)
            logits = logits.masked_fill(future, float("-inf"))
        weights = torch.softmax(logits, dim=-1)
        if self.dropout and self.training:
            weights = F.dropout(weights, self.dropout)
        return torch.matmul(weights, v), handed

    def project(self, x: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v, each (batch, head, seq, d_head), for positions from `first` on."""
        batch, seq, d = x.shape
        weight = self.qkv if self.fused else torch.cat([self.q, self.k, self.v])
        # Flatten x once: products of matrices then need no views in the backward pass.
        qkv = self.linear(x.flatten(0, 1), weight, self.qkv_bias)  # (batch * seq, 3 d)
        heads = qkv.view(batch, seq, 3, self.n_heads, d // self.n_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if slots := self.slots:
            own = (slots.get(name, same) for name in ("q", "k", "v"))
            q, k, v = (slot(h) for slot, h in zip(own, (q, k, v), strict=True))
        if (qk := self.qk) is not None:
            q, k = qk.q(q, first), qk.k(k, first)
        return q, k, v

    def out(self, y: Tensor) -> Tensor:
        """Return G(x), (batch, seq, d_model), given heads' outputs, (batch, head, seq, d_head)."""
        batch, _, seq, _ = y.shape
        slots = self.slots
        if "heads" in slots:
            y = slots["heads"](y)
        y = y.transpose(1, 2).reshape(batch * seq, -1)
        if "before_out" in slots:
            y = slots["before_out"](y)
        y = self.linear(y, self.o, self.o_bias).view(batch, seq, -1)
        rate = self.dropout if self.training else 0.0
        return F.dropout(y, rate) if rate else y


class FeedForward(nn.Module):
    """G(x) = phi(x W_1ᵀ + b_1) W_2ᵀ + b_2, phi the activation.

    gated: G(x) = (phi(x W_1ᵀ + b_1) * (x W_3ᵀ + b_3)) W_2ᵀ + b_2, element by element; with silu
    SwiGLU.  Shazeer 2020, arXiv:2002.05202, whose V is LLaMA's W_3.  One product computes both;
    with fused=False the two matrices are separate parameters.

    x: (batch, seq, d_model); W_1, W_3: (d_ff, d_model); W_2: (d_model, d_ff).  bias=False: there is
    no b.  linear: the function that applies matrices.
    Vaswani et al. 2017, arXiv:1706.03762, section 3.3.
    """

    SLOTS = ("w1", "before_activation", "after_activation")

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: str,
        dropout: float,
        *,
        gated: bool = False,
        fused: bool = True,
        bias: bool = True,
        linear: Linear = F.linear,
        slots: Slots | None = None,
    ) -> None:
        super().__init__()
        self.linear = linear
        self.slots = filled_slots(slots, self.SLOTS)
        self.activation_name, self.dropout = activation, dropout
        self.activation = ACTIVATIONS[activation]
        self.gated, self.fused = gated, fused or not gated
        if gated and fused:
            self.w13 = parameter(2 * d_ff, d_model, role=("w1", "w3"), start="matrix")
            self.w13_bias = bias_of(2 * d_ff, bias)
        else:
            self.w1 = parameter(d_ff, d_model, role="w1", start="matrix")
            if gated:
                self.w3 = parameter(d_ff, d_model, role="w3", start="matrix")
                self.w13_bias = bias_of(2 * d_ff, bias)
            else:
                self.w1_bias = bias_of(d_ff, bias)
        self.w2 = parameter(d_model, d_ff, role="w2", start="matrix")
        self.w2_bias = bias_of(d_model, bias)

    def forward(self, x: Tensor) -> Tensor:
        slots = self.slots
        hidden = self.linear(x.flatten(0, 1), *self.into())
        gate = None
        if self.gated:
            hidden, gate = hidden.chunk(2, dim=1)
        if "before_activation" in slots:
            hidden = slots["before_activation"](hidden)
        hidden = self.activation(hidden)
        if gate is not None:
            hidden = hidden * gate
        if "after_activation" in slots:
            hidden = slots["after_activation"](hidden)
        # hidden: (batch * seq, d_ff)
        y = self.linear(hidden, self.w2, self.w2_bias).view(x.shape)
        return F.dropout(y, self.dropout) if self.dropout and self.training else y

    def into(self) -> tuple[Tensor, Tensor | None]:
        """Return W_1 and b_1; with a gate, W_1 above W_3 and b_1 above b_3."""
        weight: Tensor
        if self.gated:
            weight = self.w13 if self.fused else torch.cat([self.w1, self.w3])
            bias = self.w13_bias
        else:
            weight, bias = self.w1, self.w1_bias
        return self.slots["w1"](weight, bias) if "w1" in self.slots else (weight, bias)


def bias_of(width: int, there: bool) -> RoleParameter | None:
    """Return the bias of a linear map, (width,), or None if the stack has none."""
    return parameter(width, role="bias", start="zero") if there else None


def same(h: Tensor) -> Tensor:
    """Return h unchanged, for an empty slot."""
    return h


def filled_slots(slots: Slots | None, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """Return the modules in these slots, in a plain dict because the scheme owns them."""
    return {name: slots[name] for name in names if slots is not None and name in slots}
