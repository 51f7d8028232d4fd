"""The two sublayers of every layer, self-attention and feed-forward, and their base classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.model.query_key import QueriesAndKeys
from deepstack.schemes.role import parameter

# The roots of E[sigmoid(z)^2] = 0.2933790 and E[tanh(z)^2] = 0.3942945, z ~ N(0, 1): divided by
# these, an activation preserves the second moment.  Derived: no paper defines them.
SIGMOID_RMS, TANH_RMS = 0.29337903585809**0.5, 0.39429449039784**0.5

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
    "scaled_sigmoid": lambda z: torch.sigmoid(z) / SIGMOID_RMS,
    "scaled_tanh": lambda z: torch.tanh(z) / TANH_RMS,
}


def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return y = x Wᵀ / sqrt(n_in) + b.  x: (…, n_in), W: (n_out, n_in), b: (n_out,) or None.

    The NTK parameterisation, for a W whose entries have variance gain^2.  Compare Xavier with
    'fan: in', of variance gain^2 / n_in.  Here y starts equal, the entries of W are sqrt(n_in)
    times as large, and the gradient with respect to W is 1/sqrt(n_in) as large.  So a step of SGD
    moves y by 1/n_in as much.  Jacot et al. 2018, arXiv:1806.07572, section 2.
    """
    scale = weight.shape[1] ** -0.5
    if bias is None:
        return F.linear(x, weight) * scale
    y = torch.addmm(bias, x.flatten(0, -2), weight.t(), alpha=scale)
    return y.view(*x.shape[:-1], len(bias))


Listener = Callable[[Tensor, Tensor], None]
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


JOINED = {"qkv": ("q", "k", "v"), "kv": ("k", "v"), "w13": ("w1", "w3")}
"""Joined matrices, each computed by one product, and the linear maps they consist of."""


Joins = Callable[[tuple[str, ...]], bool]
"""A function that tells whether roles may share one tensor: one optimizer setting for all."""


class LinearMaps(nn.Module):
    """The base of all sublayers: their matrices by name, and the scheme's slots in them.

    SLOTS: the slots of this sublayer.
    slots: the scheme's modules.
    joins: roles -> whether their matrices may share one tensor.
    fused: whether they do here.
    linear: (x, W, b) -> y: `F.linear`, or `scaled_linear` under NTK.
    """

    SLOTS: ClassVar[tuple[str, ...]]

    if TYPE_CHECKING:  # matrices and biases are set by name

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, model: conf.Model, slots: Slots, joins: Joins) -> None:
        super().__init__()
        self.dropout, self.has_bias = model.dropout, model.bias
        self.linear = scaled_linear if model.init.distribution == "ntk" else F.linear
        self.joins, self.fused = joins, True
        self.parts: dict[str, tuple[str, ...]] = {}  # matrix -> the parameters it consists of
        # a plain dict, because the scheme owns the modules
        self.slots = {name: slots[name] for name in self.SLOTS if name in slots}

    def add_maps(self, n_out: int, n_in: int, *names: str, prefix: str = "") -> None:
        """Set matrices, (n_out, n_in), then their biases, None if the stack has no biases.

        A joined matrix is a tensor with all parts, or one for each.

        prefix: of roles, as in cross_q.
        """
        for name in names:
            parts = JOINED.get(name, (name,))
            roles = tuple(prefix + part for part in parts)
            if self.joins(roles):
                self.parts[name] = (name,)
                setattr(self, name, parameter(len(parts) * n_out, n_in, role=roles, start="matrix"))
                continue
            self.parts[name], self.fused = parts, False
            for part, role in zip(parts, roles, strict=True):
                setattr(self, part, parameter(n_out, n_in, role=role, start="matrix"))
        for name in names:
            width = n_out * len(JOINED.get(name, (name,)))
            bias = parameter(width, role="bias", start="zero") if self.has_bias else None
            setattr(self, f"{name}_bias", bias)

    def matrix(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return a matrix and its bias, (n_out, n_in) and (n_out,) or None."""
        weights = [getattr(self, part) for part in self.parts[name]]
        weight: Tensor = weights[0] if len(weights) == 1 else torch.cat(weights)
        return weight, getattr(self, f"{name}_bias")

    def apply_map(self, name: str, x: Tensor) -> Tensor:
        """Return x Wᵀ + b."""
        return self.linear(x, *self.matrix(name))

    def fill(self, slot: str, value: Tensor) -> Tensor:
        """Return the output of a slot's module for this value, or the value if it is empty."""
        return self.slots[slot](value) if slot in self.slots else value

    def drop(self, y: Tensor) -> Tensor:
        """Return y with dropout, in training."""
        return F.dropout(y, self.dropout) if self.dropout and self.training else y


class Cache:
    """The keys and values of earlier positions, when decoding one position at a time.

    stored: keys and values, each (batch, head, seq_len, d_head), filled up to `position`.
    """

    def __init__(self, seq_len: int) -> None:
        self.seq_len, self.position = seq_len, 0
        self.stored: list[Tensor] = []

    def keep(self, *new: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of this position; return the ones of all positions so far."""
        if not self.stored:
            self.stored = [n.new_empty(*n.shape[:2], self.seq_len, n.shape[3]) for n in new]
        for old, now in zip(self.stored, new, strict=True):
            old[:, :, self.position] = now[:, :, 0]
        self.position += 1
        k, v = (old[:, :, : self.position] for old in self.stored)
        return k, v


class Heads(LinearMaps):
    """The base of all attentions: heads, their softmax and the output matrix.

    qk: norms and rotation of q and k, after the slots.
    """

    listener: Listener | None = None  # receives q and k, (batch, head, seq, d_head)

    def __init__(
        self, model: conf.Model, slots: Slots, joins: Joins, qk: QueriesAndKeys | None
    ) -> None:
        super().__init__(model, slots, joins)
        self.n_heads, self.qk = model.n_heads, qk

    def by_head(self, x: Tensor) -> Tensor:
        """Split by head: (batch, seq, d_model) -> (batch, head, seq, d_head)."""
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        """Return the heads' outputs, (batch, head, seq, d_head)."""
        if self.listener is not None:
            self.listener(q, k)
        rate = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=causal)

    def out(self, y: Tensor, mean: Tensor | None = None) -> Tensor:
        """Return G(x), (batch, seq, d_model), given heads' outputs, (batch, head, seq, d_head).

        mean: (batch, seq, d_model), added to the concatenated heads.
        """
        batch, _, seq, _ = y.shape
        y = self.fill("heads", y).transpose(1, 2).reshape(batch * seq, -1)
        if mean is not None:
            y = y + mean.flatten(0, 1)
        y = self.fill(self.SLOTS[-1], y)  # before W_o
        return self.drop(self.apply_map("o", y).view(batch, seq, -1))


class Attention(Heads):
    """G(x) = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h · W_oᵀ + b_o, [q, k, v] = x W_qkvᵀ + b.

    x: (batch, seq, d_model).  W_q, W_k, W_v, W_o: (d_model, d_model), applied as x Wᵀ.  One product
    computes q, k and v.  With separate optimizer settings the three matrices are separate
    parameters, which are concatenated first.  The values are the same.

    causal: a position reads itself and those before it.

    Vaswani et al. 2017, arXiv:1706.03762, section 3.2.

    With the slot `logits` or `mixed_values`, the result also has the tensor for the next layer, and
    `before` is the tensor of the layer before, or None.  Logits are (batch, head, seq, seq)
    for all pairs of positions, without a causal mask, so that they are finite.  Values are (batch,
    head, seq, d_head).

    cache: decodes one position, (batch, 1, d_model), after those in the cache.
    """

    SLOTS = ("q", "k", "v", "logits", "mixed_values", "heads", "before_out")

    def __init__(self, model: conf.Model, *common: Any, causal: bool) -> None:
        super().__init__(model, *common)
        self.causal = causal
        self.add_maps(model.d_model, model.d_model, "qkv")
        self.add_maps(model.d_model, model.d_model, "o")

    def forward(self, x: Tensor, before: Tensor | None = None, cache: Cache | None = None) -> Any:
        q, k, v = self.project(x, cache.position if cache else 0)
        passed_on = None
        if "mixed_values" in self.slots:
            v, passed_on = self.slots["mixed_values"](v, before)
        if cache:
            k, v = cache.keep(k, v)
        causal = self.causal and cache is None
        if "logits" in self.slots:
            current = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
            logits, passed_on = self.slots["logits"](current, before)
            if causal:
                future = torch.ones(current.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
                logits = logits.masked_fill(future, float("-inf"))
            y = torch.matmul(self.drop(torch.softmax(logits, dim=-1)), v)
        else:
            y = self.attend(q, k, v, causal)
        y = self.out(y)
        return y if passed_on is None else (y, passed_on)

    def project(self, x: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v, each (batch, head, seq, d_head), for positions from `first` on."""
        batch, seq, d = x.shape
        # Flatten x once: products of matrices then need no views in the backward pass.
        qkv = self.apply_map("qkv", x.flatten(0, 1))  # (batch * seq, 3 d)
        heads = qkv.view(batch, seq, 3, self.n_heads, d // self.n_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        q, k, v = self.fill("q", q), self.fill("k", k), self.fill("v", v)
        return (q, k, v) if self.qk is None else (self.qk.q(q, first), self.qk.k(k, first), v)


class FeedForward(LinearMaps):
    """G(x) = phi(x W_1ᵀ + b_1) W_2ᵀ + b_2, phi the activation.

    gated: G(x) = (phi(x W_1ᵀ + b_1) * (x W_3ᵀ + b_3)) W_2ᵀ + b_2, element by element; with silu
        SwiGLU.  Shazeer 2020, arXiv:2002.05202, whose V is LLaMA's W_3.  One product computes both.

    x: (batch, seq, d_model); W_1, W_3: (d_ff, d_model); W_2: (d_model, d_ff).
    Vaswani et al. 2017, arXiv:1706.03762, section 3.3.
    """

    SLOTS = ("w1", "before_activation", "after_activation")

    def __init__(self, model: conf.Model, slots: Slots, joins: Joins) -> None:
        super().__init__(model, slots, joins)
        d_ff = model.d_ff or 4 * model.d_model
        self.activation_name, self.gated = model.activation, model.gated
        self.activation = ACTIVATIONS[model.activation]
        self.first = "w13" if model.gated else "w1"
        self.add_maps(d_ff, model.d_model, self.first)
        self.add_maps(model.d_model, d_ff, "w2")

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.apply_map(self.first, x.flatten(0, 1)), None
        if self.gated:
            hidden, gate = hidden.chunk(2, dim=1)
        hidden = self.activation(self.fill("before_activation", hidden))
        if gate is not None:
            hidden = hidden * gate
        hidden = self.fill("after_activation", hidden)  # (batch * seq, d_ff)
        return self.drop(self.apply_map("w2", hidden).view(x.shape))

    def matrix(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return a matrix and its bias; with a gate, W_1 above W_3 and b_1 above b_3."""
        matrix = super().matrix(name)
        return self.slots["w1"](*matrix) if name == self.first and "w1" in self.slots else matrix
