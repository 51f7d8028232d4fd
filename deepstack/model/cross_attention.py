"""Sublayers of decoders: cross-attention, merged attention and average attention."""

from typing import Any

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.model.attention import Heads
from deepstack.model.sublayers import LinearMaps


class CrossAttention(Heads):
    """G(x) = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h · W_oᵀ + b_o, [k, v] = m W_kvᵀ + b_kv.

    q = x W_qᵀ + b_q.  x: (batch, seq, d_model); m, the encoder's output: (batch, source, d_model).
    All matrices are (d_model, d_model); one product computes k and v.
    qk: the norms of queries and keys; no rotation, as positions of two sequences have no distance.
    Vaswani et al. 2017, arXiv:1706.03762, section 3.2.3.
    """

    SLOTS = ("before_cross_out",)
    reads_memory = True

    def __init__(self, model: conf.Model, *common: Any) -> None:
        super().__init__(model, *common)
        self.add_maps(model.d_model, model.d_model, "q", "kv", prefix="cross_")
        self.add_maps(model.d_model, model.d_model, "o", prefix="cross_")

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries of the stream, (batch, head, seq, d_head)."""
        q = self.by_head(self.apply_map("q", x))
        return q if self.qk is None else self.qk.q(q)

    def project_memory(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values of the encoder's output, (batch, source, d_model)."""
        return self.apply_map("kv", memory).chunk(2, dim=-1)

    def keys_and_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return k and v of the encoder's output, each (batch, head, source, d_head)."""
        k, v = map(self.by_head, self.project_memory(memory))
        return k if self.qk is None else self.qk.k(k), v

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.read(x, *self.keys_and_values(memory))

    def read(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return G(x), given keys and values by head."""
        return self.out(self.attend(self.queries(x), k, v))


class MergedAttention(CrossAttention):
    """G(x) = (concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h + mean_{j <= i} u_j) W_oᵀ + b_o.

    q = x W_qᵀ + b_q and u = x W_vᵀ + b_v of the decoder's stream; k = m W_kᵀ + b_k and
    v = m W_vᵀ + b_v of the encoder's output, with the same W_v.  A position does not attend to the
    positions up to it but takes the mean of their values.  So one sublayer replaces self-attention
    and cross-attention, and decoding stores one sum instead of all keys and values.
    x: (batch, seq, d_model); m: (batch, source, d_model).  Zhang et al. 2019, arXiv:1908.11365,
    section 4.2.
    """

    SLOTS = ("before_out",)

    def __init__(self, model: conf.Model, *common: Any) -> None:
        Heads.__init__(self, model, *common)
        self.add_maps(model.d_model, model.d_model, "q", "k", "v", "o")

    def project_memory(self, memory: Tensor) -> tuple[Tensor, ...]:
        return self.apply_map("k", memory), self.values(memory)

    def values(self, x: Tensor) -> Tensor:
        """Return x W_vᵀ + b_v, (batch, seq, d_model)."""
        return self.apply_map("v", x)

    def read(self, x: Tensor, k: Tensor, v: Tensor, mean: Tensor | None = None) -> Tensor:
        """Return G(x), given keys and values by head; mean: of the values u up to each position."""
        mean = mean_up_to_each(self.values(x)) if mean is None else mean
        return self.out(self.attend(self.queries(x), k, v), mean)


class AverageAttention(LinearMaps):
    """G(x) = i * x + f * g, [i, f] = sigmoid([x, g] W_ifᵀ + b), g = FFN(mean_{j <= i} x_j).

    FFN(y) = relu(y W_vᵀ + b_v) W_oᵀ + b_o.  It replaces the self-attention of a decoder, and
    decoding stores one sum instead of all keys and values.  x, g: (batch, seq, d_model); W_v, W_o:
    (d_model, d_model), the width that OpenNMT-py has inside the FFN; W_i, W_f: (d_model, 2
    d_model).  The gates have the roles of self-attention's other matrices: W_i q, W_f k.  Zhang et
    al. 2018, arXiv:1805.00631, section 4; the paper's text was not at hand: the equation follows
    OpenNMT-py, which cites its equations.
    """

    SLOTS = ("before_out",)

    def __init__(self, model: conf.Model, *common: Any) -> None:
        super().__init__(model, *common)
        for name, inputs in (("q", 2), ("k", 2), ("v", 1), ("o", 1)):
            self.add_maps(model.d_model, inputs * model.d_model, name)

    def forward(self, x: Tensor, mean: Tensor | None = None) -> Tensor:
        """Return G(x); mean: of x up to each position, if it is known."""
        mean = mean_up_to_each(x) if mean is None else mean
        hidden = torch.relu(self.apply_map("v", mean.flatten(0, 1)))
        g = self.apply_map("o", self.fill("before_out", hidden)).view(x.shape)
        both = torch.cat([x, g], dim=-1).flatten(0, 1)
        i, f = (torch.sigmoid(self.apply_map(name, both)).view(x.shape) for name in ("q", "k"))
        return self.drop(i * x + f * g)


def mean_up_to_each(x: Tensor) -> Tensor:
    """Return the mean of x over each position and those before it, (batch, seq, d_model)."""
    count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
    return x.cumsum(dim=1) / count
