"""The encoder: embedding, a stack of layers under one scheme, a head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack import config as conf
from deepstack.model.heads import HEADS
from deepstack.model.sublayers import Attention, FeedForward
from deepstack.schemes import (
    NORMS,
    BatchNorm,
    Parts,
    Scheme,
    StackNorm,
    Statistics,
    Stream,
    Sublayer,
    find_scheme,
)
from deepstack.speed import Through, parameter, run_layers


class Layer(nn.Module):
    """A layer = attention and feed-forward, joined to the stream by its scheme.

    sublayers: what stands for the two; the modules themselves, or their chains (`fuse`).
    """

    def __init__(self, scheme: Scheme, attention: Attention, feed_forward: FeedForward) -> None:
        super().__init__()
        self.scheme, self.attention, self.feed_forward = scheme, attention, feed_forward
        self.sublayers: tuple[Sublayer, Sublayer] = (attention, feed_forward)

    def forward(self, x: Stream) -> Stream:
        return self.scheme.layer(x, *self.sublayers)

    def fuse(self, on: bool = True) -> None:
        """Run the sublayers as one node each where they can be (see `deepstack.speed.Chain`)."""
        modules = self.attention, self.feed_forward
        attention, feed_forward = ((m.chain() if on else None) or m for m in modules)
        self.sublayers = attention, feed_forward
        self.scheme.bind_norms(on)


class Encoder(nn.Module):
    """logits = head(F), F = x_N (normed once more where the scheme says so), x_l = layer_l(x_l-1).

    x_0 = sqrt(d/2) (E[token] + P[position]): with tables N(0, 1/d) it has unit variance per
    coordinate, and so have the logits of a tied head.  Sinusoidal positions are scaled alike.
    tokens: (batch, seq) integers; logits: (batch, seq, vocab_size).
    """

    position: Tensor

    def __init__(
        self, model: conf.Model, *, vocab_size: int, seq_len: int, fused_qkv: bool = True
    ) -> None:
        super().__init__()
        d = model.d_model
        scheme, options = find_scheme(model.scheme, model.scheme_options)
        self.scheme = scheme
        self.scale = math.sqrt(d / 2)

        def make_norm(width: int, roles: tuple[str, str] = ("norm_gain", "norm_bias")) -> StackNorm:
            said = model.norm.model_dump(exclude={"kind"})
            return NORMS[model.norm.kind](width, roles=roles, **said)

        d_ff = model.d_ff or 4 * d
        parts = Parts(d, d_ff, model.n_heads, make_norm)
        depth = model.depth
        self.schemes = [scheme(i, depth, parts, **options) for i in range(1, depth + 1)]
        self.embedding = parameter(vocab_size, d, role="embedding", start="table")
        if model.positions == "learned":
            self.position = parameter(seq_len, d, role="position", start="table")
        else:
            self.register_buffer("position", sinusoidal(seq_len, d), persistent=False)
        self.layers = nn.ModuleList(
            Layer(
                own,
                Attention(
                    d,
                    model.n_heads,
                    model.dropout,
                    fused=fused_qkv,
                    bias=model.bias,
                    slots=dict(own.slots.items()),
                ),
                FeedForward(
                    d,
                    d_ff,
                    model.activation,
                    model.dropout,
                    bias=model.bias,
                    slots=dict(own.slots.items()),
                ),
            )
            for own in self.schemes
        )
        last = ("final_norm", "final_norm")
        self.entry_norm = make_norm(d) if scheme.entry_norm else None
        self.final_norm = make_norm(d, last) if scheme.final_norm else None
        self.head = HEADS[model.head](vocab_size, d)
        self.through: Through = run_layers
        self.batch_norms = [norm for norm in self.modules() if isinstance(norm, BatchNorm)]

    @contextmanager
    def statistics(self, which: Statistics) -> Iterator[None]:
        """Batch norms use these statistics inside the block, and their own batch's outside of it.

        A training step lets running averages follow its batch, validation uses them, and all else
        (the probe, looks at every layer, a recomputed layer) takes the batch as it is.
        """
        for norm in self.batch_norms:
            norm.statistics = which
        try:
            yield
        finally:
            for norm in self.batch_norms:
                norm.statistics = "own"

    def averages(self) -> dict[str, Tensor]:
        """What batch norms remember, each over all of them side by side; empty without them."""
        if not self.batch_norms:
            return {}
        return {
            f"running.{name}": torch.cat([norm.get_buffer(name) for norm in self.batch_norms])
            for name in BatchNorm.REMEMBERED
        }

    def load_averages(self, state: dict[str, Tensor]) -> None:
        """Take from a checkpoint what `averages` gave."""
        for name in BatchNorm.REMEMBERED if self.batch_norms else ():
            buffers = [norm.get_buffer(name) for norm in self.batch_norms]
            parts = state[f"running.{name}"].split([len(buffer) for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part)

    def start(self, tokens: Tensor) -> Stream:
        """What the first layer reads: x_0, (batch, seq, d_model), or the streams made of it."""
        x = (F.embedding(tokens, self.embedding) + self.position[: tokens.shape[1]]) * self.scale
        return self.schemes[0].enter(x if self.entry_norm is None else self.entry_norm(x))

    def leave(self, stream: Stream) -> Tensor:
        """F, from what the last layer gives, (batch, seq, d_model)."""
        return self.schemes[-1].leave(stream, self.final_norm)

    def stream(self, tokens: Tensor) -> Iterator[Stream]:
        """Yield x_0, …, x_N: the stream at every layer boundary, each (batch, seq, d_model)."""
        x = self.start(tokens)
        yield x
        for layer in self.layers:
            x = layer(x)
            yield x

    def hidden(self, tokens: Tensor) -> Tensor:
        """F: the last hidden state, after the last norm, (batch, seq, d_model)."""
        return self.leave(self.through(self.layers, self.start(tokens)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens), self.embedding)


def sinusoidal(seq_len: int, d: int) -> Tensor:
    """P[p, 2i] = sqrt(2/d) sin(p / 10000^(2i/d)), P[p, 2i+1] = sqrt(2/d) cos(the same).

    Vaswani et al. 2017, arXiv:1706.03762, section 3.5, times sqrt(2/d) so that a row has norm 1
    like a row of a learned table N(0, 1/d).
    """
    at = torch.arange(seq_len, dtype=torch.float64, device="cpu")[:, None]
    rate = 10000 ** (-torch.arange(0, d, 2, dtype=torch.float64, device="cpu") / d)
    table = torch.zeros(seq_len, d, dtype=torch.float64, device="cpu")
    table[:, 0::2] = torch.sin(at * rate)
    table[:, 1::2] = torch.cos(at * rate[: d // 2])
    return (table * math.sqrt(2 / d)).float()
