"""Every scheme against its paper: equation, coefficients, initial standard deviations."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.config import Config, with_overrides
from deepstack.model import build_model
from deepstack.model.initialise import IN_LAYERS
from deepstack.schemes import SCHEMES, LayerNorm

D = 16

Sub = Callable[[Tensor], Tensor]


def literal_norm(z: Tensor, g: Tensor, b: Tensor) -> Tensor:
    mean = z.mean(-1, keepdim=True)
    variance = ((z - mean) ** 2).mean(-1, keepdim=True)
    return g * (z - mean) / torch.sqrt(variance + 1e-5) + b


# The equations once more, written from the papers: x, G, norm, N -> x.
LITERAL: dict[str, Callable[[Tensor, Sub, Sub, int], Tensor]] = {
    "post_ln": lambda x, G, LN, N: LN(x + G(x)),
    "pre_ln": lambda x, G, LN, N: x + G(LN(x)),
    "deepnorm": lambda x, G, LN, N: LN((2 * N) ** 0.25 * x + G(x)),
}

# FACTS of arXiv:2203.00555, Table 1: depth -> alpha, beta of an encoder-only DeepNorm.
DEEPNORM = {
    6: (1.8612, 0.37992),
    12: (2.2134, 0.31947),
    18: (2.4495, 0.28868),
    100: (3.7606, 0.18803),
    200: (4.4721, 0.15811),
    1000: (6.6874, 0.10574),
}


def test_every_scheme_has_a_literal_restatement() -> None:
    assert set(SCHEMES.names()) == set(LITERAL)


@pytest.mark.parametrize("name", SCHEMES.names())
@pytest.mark.parametrize("depth", [6, 1000])
def test_a_layer_is_the_equation_twice(name: str, depth: int) -> None:
    torch.manual_seed(0)
    layer = SCHEMES[name](1, depth, lambda: LayerNorm(D, eps=1e-5, gain=True, bias=True))
    layer.to_empty(device="cpu")  # parameters have no storage of their own until they are banked
    for p in layer.parameters():
        nn.init.normal_(p, 1.0, 0.3)
    A, B = torch.randn(D, D), torch.randn(D, D)
    attention, feed_forward = (lambda x: torch.tanh(x @ A)), (lambda x: torch.relu(x @ B))
    x = torch.randn(2, 3, D)
    norms = [layer.attention_norms[0], layer.feed_forward_norms[0]]
    step = LITERAL[name]

    def bound(norm: LayerNorm) -> Sub:
        return lambda z: literal_norm(z, norm.gain, norm.bias)

    expected = step(x, attention, bound(norms[0]), depth)
    expected = step(expected, feed_forward, bound(norms[1]), depth)
    torch.testing.assert_close(layer.layer(x, attention, feed_forward), expected)


@pytest.mark.parametrize(("depth", "alpha", "beta"), [(n, *v) for n, v in DEEPNORM.items()])
def test_deepnorm_coefficients_are_the_published_ones(
    depth: int, alpha: float, beta: float
) -> None:
    scheme = SCHEMES["deepnorm"]
    assert scheme.alpha(depth) == pytest.approx(alpha, rel=2e-5)
    assert scheme.beta(depth) == pytest.approx(beta, rel=3e-5)
    gains = {role: scheme.gain(role, 1, depth) for role in IN_LAYERS}
    assert gains == {r: scheme.beta(depth) if r in "v o w1 w2".split() else 1.0 for r in gains}


@pytest.mark.parametrize("name", ["post_ln", "pre_ln"])
def test_schemes_without_coefficients(name: str) -> None:
    scheme = SCHEMES[name]
    assert scheme.alpha(100) is None and scheme.beta(100) is None
    assert {scheme.gain(role, 3, 100) for role in IN_LAYERS} == {1.0}
    assert scheme.final_norm is (name == "pre_ln")


@pytest.mark.parametrize("name", SCHEMES.names())
@pytest.mark.parametrize("depth", [6, 200])
@pytest.mark.parametrize("fan", ["in_out", "in"])
@pytest.mark.parametrize("distribution", ["xavier_normal", "xavier_uniform"])
def test_initial_standard_deviations(name: str, depth: int, fan: str, distribution: str) -> None:
    config = with_overrides(
        Config(),
        {
            "model.scheme": name,
            "model.depth": depth,
            "model.d_model": 48,
            "model.d_ff": 96,
            "model.init.fan": fan,
            "model.init.distribution": distribution,
        },
    )
    banks = build_model(config, vocab_size=40).banks
    shapes = {"w1": (48, 96), "w2": (96, 48)}  # n_in, n_out
    for bank in banks:
        for role, (values,) in bank.by_role():
            if bank.start == "zero":
                assert not values.any()
            elif bank.start == "one":
                assert (values == 1).all()
            elif bank.start == "table":
                assert values.std().item() == pytest.approx(48**-0.5, rel=6 / values.numel() ** 0.5)
            else:
                n_in, n_out = shapes.get(role, (48, 48))
                variance = 2 / (n_in + n_out) if fan == "in_out" else 1 / n_in
                for layer in (1, depth):
                    wanted = SCHEMES[name].gain(role, layer, depth) * math.sqrt(variance)
                    row = values[layer - 1]
                    # the relative error of a standard deviation of n normal numbers is 1/sqrt(2n)
                    tolerance = 5 / math.sqrt(2 * row.numel())
                    assert row.std().item() == pytest.approx(wanted, rel=tolerance), (role, layer)
                    assert abs(row.mean().item()) < 5 * wanted / math.sqrt(row.numel())
                    if distribution == "xavier_uniform":
                        assert row.abs().max().item() <= math.sqrt(3) * wanted * 1.000001


@pytest.mark.parametrize("name", SCHEMES.names())
def test_beta_appears_in_no_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_overrides(Config(), {"model.scheme": name, "model.d_model": 16})
    built = build_model(config, vocab_size=20)
    tokens = torch.arange(12).view(1, 12)
    before = built.model(tokens)
    monkeypatch.setattr(SCHEMES[name], "beta", classmethod(lambda cls, depth: 1e9))
    assert torch.equal(built.model(tokens), before)


def test_deepnorm_with_coefficients_of_one_is_post_ln_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deepnorm = SCHEMES["deepnorm"]
    monkeypatch.setattr(deepnorm, "alpha", classmethod(lambda cls, depth: 1.0))
    monkeypatch.setattr(deepnorm, "beta", classmethod(lambda cls, depth: 1.0))
    tokens = torch.arange(40).view(2, 20) % 11
    outputs, gradients = [], []
    for name in ("post_ln", "deepnorm"):
        built = build_model(with_overrides(Config(), {"model.scheme": name}), vocab_size=11)
        logits = built.model(tokens)
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        outputs.append(logits)
        gradients.append(torch.cat([bank.gradients().flatten() for bank in built.banks]))
    assert torch.equal(*outputs)
    assert torch.equal(*gradients)


@pytest.mark.parametrize(("name", "norm_first"), [("post_ln", False), ("pre_ln", True)])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_layer_equals_torchs_own_encoder_layer(
    name: str, norm_first: bool, activation: str
) -> None:
    """Forward and every gradient, with copied weights, to 1e-5."""
    d, heads, d_ff, depth = 32, 4, 48, 3
    config = with_overrides(
        Config(),
        {
            "model.scheme": name,
            "model.depth": depth,
            "model.d_model": d,
            "model.n_heads": heads,
            "model.d_ff": d_ff,
            "model.activation": activation,
        },
    )
    model = build_model(config, vocab_size=20).model
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # biases, gains away from 0 and 1
    reference = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(
            d,
            heads,
            d_ff,
            dropout=0.0,
            activation=activation,
            batch_first=True,
            norm_first=norm_first,
        ),
        depth,
        norm=nn.LayerNorm(d) if norm_first else None,
        enable_nested_tensor=False,
    )
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
    for ours, theirs in zip(model.layers, reference.layers, strict=True):
        norms = [ours.scheme.attention_norms[0], ours.scheme.feed_forward_norms[0]]
        pairs += [
            (ours.attention.qkv, theirs.self_attn.in_proj_weight),
            (ours.attention.qkv_bias, theirs.self_attn.in_proj_bias),
            (ours.attention.o, theirs.self_attn.out_proj.weight),
            (ours.attention.o_bias, theirs.self_attn.out_proj.bias),
            (ours.feed_forward.w1, theirs.linear1.weight),
            (ours.feed_forward.w1_bias, theirs.linear1.bias),
            (ours.feed_forward.w2, theirs.linear2.weight),
            (ours.feed_forward.w2_bias, theirs.linear2.bias),
            *((n.gain, t.weight) for n, t in zip(norms, (theirs.norm1, theirs.norm2), strict=True)),
            *((n.bias, t.bias) for n, t in zip(norms, (theirs.norm1, theirs.norm2), strict=True)),
        ]
    if norm_first:
        pairs += [
            (model.final_norm.gain, reference.norm.weight),
            (model.final_norm.bias, reference.norm.bias),
        ]
    with torch.no_grad():
        for ours, theirs in pairs:
            theirs.copy_(ours.view_as(theirs))
    tokens = torch.arange(24).view(2, 12) % 20
    x0 = next(iter(model.stream(tokens))).detach()
    weights = torch.randn(2, 12, d)
    expected = reference(x0)
    found = model.hidden(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad.view_as(theirs), theirs.grad, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", SCHEMES.names())
def test_a_thousand_layers_are_finite_forward_and_backward(name: str) -> None:
    changes = {"model.scheme": name, "model.depth": 1000, "model.d_model": 8, "model.d_ff": 8}
    built = build_model(with_overrides(Config(), changes), vocab_size=11)
    tokens = torch.arange(16).view(2, 8) % 11
    loss = F.cross_entropy(built.model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    assert torch.isfinite(loss)
    for bank in built.banks:
        assert torch.isfinite(bank.gradients()).all(), bank.key


def test_the_equation_shown_to_users_is_the_docstrings_first() -> None:
    assert SCHEMES["deepnorm"].equation == "x <- LN(alpha x + G(x)), alpha = (2N)^(1/4)"
    assert SCHEMES["pre_ln"].equation == "x <- x + G(LN(x))"
