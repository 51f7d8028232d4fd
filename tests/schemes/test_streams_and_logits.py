"""What is handed on besides x: logits, streams and values; and the NTK parameterisation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.scheme_pieces import HEADS, TOKENS, D, built, config

from deepstack.config import with_overrides
from deepstack.config.roles import MATRICES
from deepstack.fast import FastPaths, enable_fast_paths
from deepstack.model import build_model

SIDES = torch.arange(24).view(2, 12) * 5 % 11  # source and target side by side
PLAIN, FUSED = FastPaths(False, False, False), FastPaths(True, False, False)


def gradients(found: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a sum of F with fixed weights, by key."""
    found.banks.zero_gradients()
    F_ = found.model.hidden(tokens)
    torch.manual_seed(3)
    (F_ * torch.randn_like(F_)).sum().backward()
    return {bank.key: bank.gradients() for bank in found.banks}


FAMILIES: list[dict[str, Any]] = [
    {},
    {"model__family": "decoder"},
    {"model__family": "encoder_decoder"},
    {"model__family": "encoder_decoder", "model__decoder_attention": "merged"},
]


# -- hyper-connections ---------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("streams", [1, 2, 4, 7])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_hyper_connections_start_as_pre_ln(
    family: dict[str, Any], streams: int, dynamic: bool
) -> None:
    """F and the gradients of all matrices: LN(n x) is LN(x) but for eps / n^2 in place of eps."""
    options = {"streams": streams, "dynamic": dynamic}
    many = built("hyper_connections", 5, model__scheme_options=options, **family)
    one = built("pre_ln", 5, **family)
    names = {name.rpartition("connections.")[2] for name, _ in many.model.named_parameters()}
    assert ("map" in names) is dynamic
    tokens = SIDES if one.model.source_len else TOKENS
    torch.testing.assert_close(
        many.model.hidden(tokens), one.model.hidden(tokens), rtol=1e-4, atol=2e-5
    )
    ours, pre_ln = gradients(many, tokens), gradients(one, tokens)
    for bank in many.banks:
        if bank.start in ("matrix", "table"):
            expected = pre_ln[bank.key]
            tolerance = 2e-5 * expected.abs().max().item()
            torch.testing.assert_close(ours[bank.key], expected, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize(("merged", "per_layer"), [(False, 3), (True, 2)])
def test_sublayers_read_one_stream_after_the_other(merged: bool, per_layer: int) -> None:
    family = FAMILIES[3 if merged else 2]
    model = built("hyper_connections", 4, **family).model
    for side, sublayers in (("encoder", 2), ("decoder", per_layer)):
        made = [c for s in model.stacks[side].schemes for c in s.each("connections")]
        read = [int(c.begin[:, 0, 0, 0].argmax()) for c in made]
        assert read == [k % 4 for k in range(4 * sublayers)]


# -- RealFormer ----------------------------------------------------------------------------------


def test_logits_are_handed_on_in_fp32() -> None:
    model = built("real_former", 4, model__family="decoder").model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        streams = list(model.last.stream(model.start(TOKENS)))
    assert streams[0][1] is None
    for _, logits in streams[1:]:
        assert logits.dtype is torch.float32 and logits.isfinite().all()


def test_dropout_falls_on_attention_weights_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("real_former", 2, model__dropout=0.25).model.train()
    dropped: list[tuple[torch.Size, float]] = []
    plain = F.dropout

    def watch(x: torch.Tensor, p: float) -> torch.Tensor:
        dropped.append((x.shape, p))
        if x.ndim == 4:
            torch.testing.assert_close(x.sum(-1), torch.ones(x.shape[:3]))  # after the softmax
        return plain(x, p)

    monkeypatch.setattr(F, "dropout", watch)
    model.hidden(TOKENS)
    layer = [((2, HEADS, 6, 6), 0.25), ((2, 6, D), 0.25), ((2, 6, D), 0.25)]
    assert [(tuple(shape), p) for shape, p in dropped] == 2 * layer
    dropped.clear()
    model.eval()
    assert torch.equal(model.hidden(TOKENS), model.hidden(TOKENS)) and not dropped


# -- values, maps and parts of the stream ----------------------------------------------------------


def test_learnable_coefficients_start_at_a_half_and_are_trained() -> None:
    one = built("res_former", 4, model__scheme_options={"learnable": True})
    torch.testing.assert_close(
        one.model.hidden(TOKENS), built("res_former", 4).model.hidden(TOKENS)
    )
    one.model.hidden(TOKENS).square().mean().backward()
    for l, layer in enumerate(one.model.layers, start=1):
        slot = layer.scheme.slots["mixed_values"]
        assert (slot.of_first.item(), slot.of_own.item()) == (0.5, 0.5)
        assert bool(slot.of_first.grad) == bool(slot.of_own.grad) == (l > 1)


def test_value_residuals_drop_attention_weights_as_pre_ln_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates: list[float] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watch(*args: Any, dropout_p: float, **more: Any) -> torch.Tensor:
        rates.append(dropout_p)
        return plain(*args, dropout_p=dropout_p, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    model = built("res_former", 2, model__dropout=0.25).model
    model.train().hidden(TOKENS)
    model.eval().hidden(TOKENS)
    assert rates == [0.25, 0.25, 0.0, 0.0]


def test_the_low_rank_map_starts_with_orthogonal_columns() -> None:
    scheme = built("laurel", 1, model__scheme_options={"rank": 3}).model.schemes[0]
    A = scheme.begin  # (rank, d): each of the 12 coordinates goes to one of 3
    torch.testing.assert_close(A @ A.T, torch.eye(3) * (D / 3) / (3 * D))
    assert ((A != 0).sum(0) == 1).all() and A[1, 4] == A[1, 7] == 1 / 6


@pytest.mark.parametrize("name", ["frac_connections", "hyper_connections"])
def test_mixed_streams_are_not_rounded_under_autocast(name: str) -> None:
    model = built(name, 6).model
    with torch.no_grad():
        for layer in model.layers:
            layer.attention.o.zero_(), layer.feed_forward.w2.zero_()
    x = model.start(TOKENS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        *_, stream = model.last.stream(x)
    for last in (stream,) if torch.is_tensor(stream) else stream:
        assert last.dtype is torch.float32 and torch.equal(last, x.expand_as(last))


def test_layers_grow_in_one_after_the_other_and_end_as_pre_ln() -> None:
    options = {"ramp_steps": 10}
    slow, pre_ln = built("pro_res", 4, model__scheme_options=options), built("pre_ln", 4)
    *_, last = slow.model.last.stream(slow.model.start(TOKENS))
    assert torch.equal(last, slow.model.start(TOKENS))  # F_0: no branch is there yet
    for step, wanted in ((1, [0.0] * 4), (16, [1.0, 15 / 20, 15 / 30, 15 / 40])):
        slow.at_step(step)  # a = (t - 1) / (l ramp_steps): the first step trains with 0
        assert [s.ramp.item() for s in slow.model.schemes] == pytest.approx(wanted)
    slow.at_step(41)
    torch.testing.assert_close(slow.model.hidden(TOKENS), pre_ln.model.hidden(TOKENS))


@pytest.mark.parametrize("family", ["encoder", "decoder"])
def test_siamese_norm_has_no_parameter_without_use(family: str) -> None:
    """Six norms in each layer, and three at the end of the stack."""
    depth = 5
    one = built("siamese_norm", depth, model__family=family)
    counts = one.banks.count()
    assert counts["norm_gain"] == counts["norm_bias"] == (6 * depth + 2) * D
    assert counts["final_norm"] == 2 * D
    F = one.model.hidden(TOKENS)
    (F * torch.randn_like(F)).sum().backward()
    for bank in one.banks:
        used = bank.gradients().flatten(1).any(dim=1)
        assert used.all() or bank.key.startswith("head"), bank.key


# -- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepnorm", "hyper_connections", "real_former"])
def test_fused_matrices_are_trained_under_frozen_tables(name: str) -> None:
    """Chains have a backward pass only where what they read has a gradient."""
    given = {"train__trainable": ["q", "k", "v", "w1"]}
    fused, plain = built(name, 3, **given), built(name, 3, **given)
    enable_fast_paths(fused.model, FUSED, 0, print)
    enable_fast_paths(plain.model, PLAIN, 0, print)
    ours, expected = gradients(fused, TOKENS), gradients(plain, TOKENS)
    for bank in plain.trained:
        assert (expected[bank.key].flatten(1).norm(dim=1) > 0).all()
        torch.testing.assert_close(ours[bank.key], expected[bank.key], rtol=1e-4, atol=1e-4)
    frozen = {bank.key for bank in fused.banks} - {bank.key for bank in fused.trained}
    assert frozen and not any(found[key].any() for found in (ours, expected) for key in frozen)


# -- the NTK parameterisation --------------------------------------------------------------------

NTK: list[dict[str, Any]] = [
    *FAMILIES,
    {"model__bias": False},
    {"model__family": "encoder_decoder", "model__bias": False},
    {"train__lr_factors": {"v": 0.5}},
    {"model__head": "bert"},
    {"model__head": "separate"},
    {"model__scheme": "sub_ln"},
    {"model__scheme": "real_former", "model__family": "decoder"},
    {"model__scheme": "hyper_connections"},
]


@pytest.mark.parametrize("ways", [PLAIN, FUSED], ids=["plain", "fused"])
@pytest.mark.parametrize("choice", NTK, ids=str)
def test_ntk_starts_as_fan_in_and_its_gradients_are_divided(
    choice: dict[str, Any], ways: FastPaths
) -> None:
    """Logits equal; gradients of matrices 1/sqrt(n_in) of the others, of all else the same."""
    given = config("pre_ln", 4, **choice)
    ntk = build_model(with_overrides(given, {"model.init.distribution": "ntk"}), vocab_size=11)
    fan_in = build_model(with_overrides(given, {"model.init.fan": "in"}), vocab_size=11)
    tokens = SIDES if ntk.model.source_len else TOKENS
    found: list[dict[str, torch.Tensor]] = []
    for one in (ntk, fan_in):
        enable_fast_paths(one.model, ways, 0, print)
        found.append(gradients(one, tokens))
    torch.testing.assert_close(ntk.model(tokens), fan_in.model(tokens), rtol=1e-4, atol=1e-4)
    matrices = set()
    for ours, theirs in zip(ntk.banks, fan_in.banks, strict=True):
        root = 1.0
        if ours.roles[0] in MATRICES:
            matrices |= set(ours.roles)
            root = math.sqrt(ours.shape[1])
            torch.testing.assert_close(ours.values(), root * theirs.values())
        else:
            assert torch.equal(ours.values(), theirs.values())
        expected = found[1][ours.key] / root
        # the gradient of the bias of k is zero but for rounding
        tolerance = 1e-4 * expected.abs().max().item() + 1e-6
        torch.testing.assert_close(found[0][ours.key], expected, rtol=1e-3, atol=tolerance)
    both = choice.get("model__family") == "encoder_decoder"
    crossing = both and "merged" not in choice.values()
    crossed = {role for role in MATRICES if role.startswith("cross_")}
    assert matrices == {"q", "k", "v", "o", "w1", "w2"} | (crossed if crossing else set())
