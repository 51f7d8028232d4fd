"""A decoder's layer of three sublayers is its scheme's equation, three times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepstack.config import Config, with_overrides
from deepstack.model import build_model
from deepstack.schemes import SCHEMES

D, N, M = 16, 3, 4
NAMES = sorted(name for name, s in SCHEMES.items() if "encoder_decoder" in s.families)


class Sublayers:
    """A, C, F of one layer as functions of the stream, its norms, and what it owns by sublayer."""

    def __init__(self, layer: Any, memory: Tensor) -> None:
        s = self.s = layer.scheme
        self.G: tuple[Callable[[Tensor], Tensor], ...] = (
            lambda x: layer.attention(x),
            lambda x: layer.cross_attention(x, memory),
            lambda x: layer.feed_forward(x),
        )
        groups = (s.attention_norms, s.cross_attention_norms, s.feed_forward_norms)
        self.n = [group[0] if len(group) else None for group in groups]
        self.scales = self.own("scale")
        self.omegas, self.scalars = self.own("omega"), self.own("scalars")

    def own(self, what: str) -> list[Any]:
        names = ("attention", "cross_attention", "feed_forward")
        return [getattr(self.s, f"{name}_{what}", None) for name in names]


def each(step: Callable[..., Tensor]) -> Callable[[Sublayers, Any], Any]:
    """x after the three, each by step(p, i, x)."""

    def layer(p: Sublayers, x: Any) -> Any:
        for i in range(3):
            x = step(p, i, x)
        return x

    return layer


def post(alpha: float = 1.0) -> Callable[[Sublayers, Any], Any]:
    return each(lambda p, i, x: p.n[i](alpha * x + p.G[i](x)))


pre = each(lambda p, i, x: x + p.G[i](p.n[i](x)))


def b2t(p: Sublayers, x: Any) -> Any:
    u = p.n[1](p.n[0](x + p.G[0](x)) + p.G[1](p.n[0](x + p.G[0](x))))
    return p.n[2](x + u + p.G[2](u))


def residual(p: Sublayers, x: Any) -> Any:
    x, r = x
    for i in range(3):
        f = p.G[i](x)
        x, r = p.n[i](x + f), r + f
    return x, r


def dlcl(p: Sublayers, x: Any) -> Any:
    now, history = x
    history = (*history, p.s.output_norm(pre(p, now)))
    weights = p.s.weights[: len(history)] + 1 / len(history)
    return sum(w * y for w, y in zip(weights, history, strict=True)), history


LITERAL: dict[str, Callable[[Sublayers, Any], Any]] = {
    "post_ln": post(), "post_ln_init": post(), "ds_init": post(),
    "deepnorm": post((3 * M) ** 0.25),
    "pre_ln": pre, "sub_ln": pre,
    "branch_norm": each(lambda p, i, x: p.n[i](x + 7 / 4000 * p.G[i](x))),
    "admin": each(lambda p, i, x: p.n[i](p.omegas[i] * x + p.G[i](x))),
    "rezero": each(lambda p, i, x: x + p.s.scale * p.G[i](x)),
    "skip_init": each(lambda p, i, x: x + p.scales[i] * p.G[i](x)),
    "t_fixup": each(lambda p, i, x: x + p.G[i](x)),
    "fixup": each(
        lambda p, i, x: x
        + (1 + p.scalars[i][1]) * p.G[i](x + p.scalars[i][0])
        + p.scalars[i][2]
    ),
    "b2t": b2t, "residual": residual, "dlcl": dlcl,
}  # fmt: skip
ELSEWHERE = {"hyper_connections"}  # in test_more_schemes.py, of every family


def test_every_scheme_of_an_encoder_decoder_is_restated() -> None:
    assert set(NAMES) == set(LITERAL) | ELSEWHERE


@pytest.mark.parametrize("name", sorted(LITERAL))
def test_a_layer_of_three_sublayers_is_its_equation(name: str) -> None:
    keys = {
        "model.family": "encoder_decoder", "model.scheme": name, "model.depth": N,
        "model.decoder_depth": M, "model.d_model": D, "task.seq_len": 6,
    }  # fmt: skip
    built = build_model(with_overrides(Config(), keys), vocab_size=11)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in built.model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    built.at_step(7)
    memory, x = torch.randn(2, 5, D), torch.randn(2, 6, D)
    for index, layer in enumerate(built.model.decoder.layers, start=1):
        stream: Any = x
        if name == "residual":
            stream = x, torch.randn(2, 6, D)
        elif name == "dlcl":
            stream = x, tuple(torch.randn(2, 6, D) for _ in range(index))
        expected = LITERAL[name](Sublayers(layer, memory), stream)
        found = layer(stream, memory)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_lies_inside_of_the_sublayers_of_a_decoder() -> None:
    def layer(name: str) -> Any:
        keys = {"model.family": "encoder_decoder", "model.scheme": name, "model.depth": 2}
        return build_model(with_overrides(Config(), keys), vocab_size=11).model.decoder.layers[1]

    assert set(layer("sub_ln").cross_attention.slots) == set()
    assert set(layer("sub_ln").attention.slots) == {"before_out"}
    assert set(layer("fixup").cross_attention.slots) == {"before_cross_out"}


def test_the_encoder_beside_a_decoder_has_its_own_alpha() -> None:
    keys = {"model.family": "encoder_decoder", "model.depth": 5, "model.decoder_depth": 9}
    model = build_model(with_overrides(Config(), keys), vocab_size=11).model
    x, layer = torch.randn(2, 4, 64), model.encoder.layers[2]
    alpha = 0.81 * (5**4 * 9) ** (1 / 16)
    first, second = (norms[0] for norms in layer.scheme.each("norms"))
    y = first(alpha * x + layer.attention(x))
    torch.testing.assert_close(layer(x), second(alpha * y + layer.feed_forward(y)))


def test_ds_init_shrinks_the_matrices_of_cross_attention_too() -> None:
    scheme = SCHEMES["ds_init"]
    for role in ("cross_q", "cross_k", "cross_v", "cross_o"):
        assert scheme.gain(role, 4, 9) == pytest.approx(0.5)
