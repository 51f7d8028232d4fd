"""A layer of a small model, taken apart into sublayers and norms."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack.config import Config
from deepstack.model import Layer, build_model
from helpers.configs import config_with
from helpers.scheme_literals import One, norm

D, HEADS, D_FF = 12, 3, 20


def same(y: Any) -> Any:
    return y


class Pieces(NamedTuple):
    """A layer taken apart: its scheme, sublayers and norms, without any of the layer's own code."""

    layer: Layer
    s: Any  # the scheme: its own parameters
    a: list[One]  # norms of the attention
    f: list[One]  # norms of the feed-forward
    l: int
    N: int

    def A(
        self, x: Tensor, qkv: Callable[..., Any] = same, logits: One = same, heads: One = same,
        out: One = same,
    ) -> Tensor:  # fmt: skip
        m = self.layer.attention
        split = (x @ m.qkv.T + m.qkv_bias).view(*x.shape[:2], 3, HEADS, -1)
        q, k, v = qkv(split.permute(2, 0, 3, 1, 4))
        weights = torch.softmax(logits(q @ k.transpose(-1, -2) / math.sqrt(D / HEADS)), -1)
        y = heads(weights @ v).transpose(1, 2).reshape(x.shape)
        return out(y) @ m.o.T + m.o_bias

    def F(self, x: Tensor, hidden: One = same, linear: One = same) -> Tensor:
        m = self.layer.feed_forward
        return hidden(torch.relu(linear(x @ m.w1.T + m.w1_bias))) @ m.w2.T + m.w2_bias

    def slot(self, name: str) -> Any:
        return self.s.slots[name]

    def each(self) -> list[tuple[str, One, list[One]]]:
        """Name, function and norms of each sublayer."""
        return [("attention", self.A, self.a), ("feed_forward", self.F, self.f)]


def config(name: str, depth: int, **changes: Any) -> Config:
    keys = {
        "model.scheme": name, "model.depth": depth, "model.d_model": D, "model.n_heads": HEADS,
        "model.d_ff": D_FF, "task.seq_len": 6,
    }  # fmt: skip
    return config_with(keys, **changes)


def built(name: str, depth: int, **changes: Any) -> Any:
    return build_model(config(name, depth, **changes), vocab_size=11)


@torch.no_grad()
def move(model: torch.nn.Module, unless: tuple[str, ...] = ()) -> None:
    """Move every parameter away from where it starts, unless its name ends with one of these."""
    torch.manual_seed(1)
    for name, p in model.named_parameters():
        if not name.endswith(unless):
            p.add_(0.2 * torch.randn_like(p))


def perturbed(name: str, depth: int, **changes: Any) -> Any:
    """A model whose every parameter is away from where it starts, 0 and 1 above all."""
    model = built(name, depth, **changes)
    move(model.model)
    model.at_step(7)
    return model.model


TOKENS = torch.arange(12).view(2, 6) % 11


def pieces(layer: Any, l: int, depth: int) -> Pieces:
    s = layer.scheme
    norms = [[norm(n) for n in ns] for ns in (s.attention_norms, s.feed_forward_norms)]
    return Pieces(layer, s, *norms, l, depth)
