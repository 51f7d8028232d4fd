"""Self-attention: its heads, its kinds, and the cache of a decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from deepstack import config as conf
from deepstack.base.errors import ConfigError
from deepstack.base.kinds import Definition, Kind
from deepstack.config.sizes import FP32
from deepstack.model.query_key import QueriesAndKeys
from deepstack.model.sublayers import JOINED, Joins, LinearMaps, Slots

Listener = Callable[..., None]
"""Receives q and k, (batch, head, seq, d_head), and two keywords where an attention has them.

masked: pairs of positions of two documents.
logits: those that the softmax gets in place of q kᵀ / sqrt(d_head), before soft cap and masks.
"""


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

    listener: Listener | None = None

    def __init__(
        self, model: conf.Model, slots: Slots, joins: Joins, qk: QueriesAndKeys | None
    ) -> None:
        super().__init__(model, slots, joins)
        self.n_heads, self.qk, self.listener = model.n_heads, qk, None

    def by_head(self, x: Tensor) -> Tensor:
        """Split by head: (batch, seq, d_model) -> (batch, head, seq, d_head)."""
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def logits(self, q: Tensor, k: Tensor) -> Tensor:
        """Return q kᵀ / sqrt(d_head), (batch, head, seq, seq), without mask."""
        return torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))

    def limited(self, logits: Tensor) -> Tensor:
        """Return the logits as the softmax reads them, but for the causal mask."""
        return logits

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


ATTENTIONS: Kind[AttentionSublayer] = Kind("attention", "model.attention")


class AttentionSublayer(Heads, Definition, kind=ATTENTIONS):
    """The base of self-attentions, G(x) = concat_h y_h · W_oᵀ + b_o; each has a name.

    x, G(x): (batch, seq, d_model).  One product computes q, k and v.  With separate optimizer
    settings the three matrices are separate parameters, which are concatenated first.  The values
    are the same.

    Grouped queries, `model.n_kv_heads`: equal numbers of heads of queries read each head of keys
    and values; W_k, W_v: (n_kv_heads d_head, d_model).  Ainslie et al. 2023, arXiv:2305.13245,
    section 2.2; one head is multi-query attention, Shazeer 2019, arXiv:1911.02150.

    causal: a position reads itself and those before it.
    """

    SLOTS: ClassVar[tuple[str, ...]] = ("q", "k", "v", "heads", "before_out")

    def __init__(self, model: conf.Model, *common: Any, causal: bool) -> None:
        super().__init__(model, *common)
        self.causal = causal
        d, self.n_kv_heads = model.d_model, model.n_kv_heads or model.n_heads
        if self.n_kv_heads == self.n_heads:
            self.add_maps(d, d, "qkv")
        else:
            self.add_maps(d, d, "q")
            self.add_maps(d * self.n_kv_heads // self.n_heads, d, "kv")
        self.add_maps(d, d, "o")

    @classmethod
    def extra_memory(cls, sizes: conf.StackSizes) -> int:
        """Return the bytes that a stack keeps for gradients beside those of softmax attention."""
        return 0

    @classmethod
    def extra_flops(cls, sizes: conf.StackSizes) -> int:
        """Return the FLOPs of a stack's forward pass beside those of softmax attention."""
        return 0

    def forward(self, x: Tensor) -> Any:
        """Return G(x)."""
        return self.out(self.mix(*self.project(x)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the heads' outputs y given q, k and v, each (batch, head, seq, d_head)."""
        raise NotImplementedError

    def project(self, x: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v, each (batch, head, seq, d_head), for positions from `first` on."""
        return self.prepare(*self.products(x), first)

    def products(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x W_qᵀ + b_q, x W_kᵀ + b_k and x W_vᵀ + b_v, by head."""
        batch, seq, d = x.shape
        # Flatten x once: products of matrices then need no views in the backward pass.
        flat, d_head = x.flatten(0, 1), d // self.n_heads
        if self.n_kv_heads == self.n_heads:
            qkv = self.apply_map("qkv", flat)  # (batch * seq, 3 d)
            heads = qkv.view(batch, seq, 3, self.n_heads, d_head)
            q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q = self.by_head(self.apply_map("q", flat).view(batch, seq, d))
            heads = self.apply_map("kv", flat).view(batch, seq, 2, self.n_kv_heads, d_head)
            k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v

    def prepare(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v after slots, norms and rotation, for all heads."""
        q, k, v = self.fill("q", q), self.fill("k", k), self.fill("v", v)
        if self.qk is not None:
            q, k = self.qk.q(q, first), self.qk.k(k, first)
        return q, self.for_all_heads(k), self.for_all_heads(v)

    def for_all_heads(self, h: Tensor) -> Tensor:
        """Repeat each head of keys or values for the heads of queries that read it."""
        repeats = self.n_heads // self.n_kv_heads
        return h if repeats == 1 else h.repeat_interleave(repeats, dim=1)


class Attention(AttentionSublayer, name="softmax"):
    """G(x) = concat_h softmax(q_h k_hᵀ / sqrt(d_head)) v_h · W_oᵀ + b_o, [q, k, v] = x W_qkvᵀ + b.

    x: (batch, seq, d_model).  W_q, W_k, W_v, W_o: (d_model, d_model), applied as x Wᵀ.
    Vaswani et al. 2017, arXiv:1706.03762, section 3.2.

    With a window w position i reads the positions j with |i - j| < w alone, in a decoder itself and
    the w - 1 before it: Beltagy et al. 2020, arXiv:2004.05150, section 3.1.  With a soft cap c the
    logits l are c tanh(l/c): Gemma 2, arXiv:2408.00118, section 2.

    With the slot `logits` or `mixed_values`, the result also has the tensor for the next layer, and
    `before` is the tensor of the layer before, or None.  Logits are (batch, head, seq, seq)
    for all pairs of positions, without a causal mask, so that they are finite.  Values are (batch,
    head, seq, d_head).  With the slot `inputs`, `before` is what its module reads beside x.

    cache: decodes one position, (batch, 1, d_model), after those in the cache.
    memory: with `model.document_end`, which positions are of one document, (batch, 1, seq, seq); a
        position reads its own document alone.
    """

    SLOTS = ("inputs", "q", "k", "v", "logits", "mixed_values", "heads", "before_out")
    window: Annotated[
        int | None, Field(ge=1, description="positions that a position reads to one side, with it")
    ] = None
    soft_cap: Annotated[float | None, Field(gt=0, description="c of the logits c tanh(l/c)")] = None

    @classmethod
    def extra_memory(cls, sizes: conf.StackSizes) -> int:
        # under a soft cap the logits, their cap and the weights, which no fused kernel avoids
        weights = sizes.depth * sizes.batch * sizes.heads * sizes.seq**2 * FP32
        return 0 if cls.soft_cap is None else 3 * weights

    def __init__(self, model: conf.Model, *common: Any, causal: bool) -> None:
        super().__init__(model, *common, causal=causal)
        self.reads_memory = model.document_end is not None

    def forward(
        self,
        x: Tensor,
        before: Any = None,
        cache: Cache | None = None,
        memory: Tensor | None = None,
    ) -> Any:
        if self.reads_memory and memory is None:
            raise ConfigError(
                "model.document_end: a pass without the tokens of whole sequences, such as "
                "decoding position by position, does not know the documents; allowed null",
                key="model.document_end",
            )
        first = cache.position if cache else 0
        if "inputs" in self.slots:
            inputs = self.slots["inputs"](x, before)
            q, k, v = self.products_of_each(inputs)
            q, k, v = self.prepare(q, k, v, first)
        else:
            q, k, v = self.project(x, first)
        passed_on = None
        if "mixed_values" in self.slots:
            v, passed_on = self.slots["mixed_values"](v, before)
        if cache:
            k, v = cache.keep(k, v)
        causal = self.causal and cache is None
        if "logits" in self.slots or self.soft_cap is not None:
            logits = self.logits(q, k)
            if "logits" in self.slots:
                logits, passed_on = self.slots["logits"](logits, before)
            if self.listener is not None:
                self.listener(q, k, masked=None if memory is None else ~memory, logits=logits)
            logits = self.limited(logits)
            if memory is not None:
                logits = logits.masked_fill(~memory, float("-inf"))
            if causal:
                logits = logits.masked_fill(later_positions(logits), float("-inf"))
            y = torch.matmul(self.drop(torch.softmax(logits, dim=-1)), v)
        elif memory is None:
            y = self.attend(q, k, v, causal)
        else:
            y = self.attend_masked(q, k, v, causal, ~memory)
        y = self.out(y)
        return y if passed_on is None else (y, passed_on)

    def products_of_each(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return q, k and v by head, each the product of its own input, (batch, seq, d_model)."""
        maps: list[tuple[Tensor, Tensor | None]] = []
        for name in ("qkv",) if self.n_kv_heads == self.n_heads else ("q", "kv"):
            weight, bias = self.matrix(name)
            count = len(JOINED.get(name, (name,)))
            biases = [None] * count if bias is None else bias.chunk(count)
            maps += zip(weight.chunk(count), biases, strict=True)
        heads = (self.n_heads, self.n_kv_heads, self.n_kv_heads)
        return [
            self.linear(x.flatten(0, 1), *one).view(*x.shape[:2], n, -1).transpose(1, 2)
            for x, one, n in zip(inputs, maps, heads, strict=True)
        ]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        """Return the heads' outputs, (batch, head, seq, d_head), of positions in the window."""
        if self.window is None:
            return super().attend(q, k, v, causal)
        return self.attend_masked(q, k, v, causal)

    def attend_masked(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, others: Tensor | None = None
    ) -> Tensor:
        """Return the heads' outputs under a mask; others: pairs of positions of two documents."""
        if self.listener is not None:
            self.listener(q, k, masked=others)
        unread = self.outside(q.shape[2], k.shape[2], q.device)
        if causal:
            unread = unread | torch.ones_like(unread).triu(1)
        if others is not None:
            unread = unread | others
        rate = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~unread, dropout_p=rate)

    def limited(self, logits: Tensor) -> Tensor:
        """Return logits, (batch, head, seq, seq), with soft cap and window, without causal mask."""
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        if self.window is None:
            return logits
        unread = self.outside(logits.shape[-2], logits.shape[-1], logits.device)
        return logits.masked_fill(unread, float("-inf"))

    def outside(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return which positions are outside of the window, (queries, keys).

        Without as many queries as keys, the queries are the last positions.
        """
        at = torch.arange(keys, device=device)
        return (at[keys - queries :, None] - at).abs() >= (self.window or keys)


def same_document(tokens: Tensor, end: int) -> Tensor:
    """Return which positions are of one document, (batch, 1, seq, seq); `end` ends a document."""
    is_end = tokens == end
    document = is_end.cumsum(dim=1) - is_end.long()
    return (document[:, :, None] == document[:, None, :])[:, None]


def later_positions(logits: Tensor) -> Tensor:
    """Return the mask of positions after each position, (seq, seq)."""
    return torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
