"""The base of all sublayers: linear maps with biases, and the modules of a scheme inside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.schemes.role import parameter


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


Slots = Mapping[str, nn.Module]
"""The modules of a scheme that run inside a sublayer, by slot:

| slot             | sublayer     | input (the output replaces it)                                |
|------------------|--------------|---------------------------------------------------------------|
| inputs           | attention    | x, (batch, seq, d_model), and what the scheme passes as       |
|                  |              | `before`; returns the inputs of q, k and v, three like x      |
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
    reads_memory: whether it reads another tensor beside the stream, which a layer calls its memory.
    slots: the scheme's modules.
    joins: roles -> whether their matrices may share one tensor.
    fused: whether they do here.
    linear: (x, W, b) -> y: `F.linear`, or `scaled_linear` under NTK.
    """

    SLOTS: ClassVar[tuple[str, ...]]
    reads_memory = False

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
