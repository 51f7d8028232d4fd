"""Values passed on besides x: logits, streams and values; and the NTK parameterisation."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.papers import PAPERS
from helpers.scheme_pieces import HEADS, TOKENS, D, built, config, perturbed, pieces

from deepstack.config import with_overrides
from deepstack.config.roles import MATRICES
from deepstack.fast import FastPaths, enable_fast_paths
from deepstack.model import build_model
from deepstack.model.stack import run_layers
from deepstack.schemes import SCHEMES
from deepstack.schemes.mixing import sinkhorn

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


HYPER = [
    ("hyper_connections", {"streams": n, "dynamic": dynamic}, family)
    for n in (1, 2, 4, 7)
    for dynamic in (True, False)
    for family in FAMILIES
]
ONE_STREAM = [
    (name, options, {})
    for name in ("gpas", "dense_former", "laurel", "frac_connections", "mudd")
    for options in ({}, *PAPERS[name].options)
]


@pytest.mark.parametrize(("name", "options", "family"), [*HYPER, *ONE_STREAM])
def test_the_stack_starts_as_pre_ln(name: str, options: Any, family: Any) -> None:
    """F and the gradients of all matrices; LN(n x) is LN(x) but for eps / n^2 in place of eps."""
    one, pre_ln = (
        built(name, 5, model__scheme_options=options, **family),
        built("pre_ln", 5, **family),
    )
    tokens = SIDES if one.model.source_len else TOKENS
    torch.testing.assert_close(
        one.model.hidden(tokens), pre_ln.model.hidden(tokens), rtol=1e-4, atol=2e-5
    )
    ours, theirs = gradients(one, tokens), gradients(pre_ln, tokens)
    for bank in one.banks:
        drawn = bank.start in ("matrix", "table") and bank.key in theirs
        if drawn and PAPERS[name].differentiable:
            expected = theirs[bank.key]
            tolerance = 2e-5 * expected.abs().max().item()
            torch.testing.assert_close(ours[bank.key], expected, rtol=1e-4, atol=tolerance)


def test_one_static_sum_of_mudd_is_a_dense_former() -> None:
    options = {"dynamic": False, "multiway": False}
    mudd = built("mudd", 5, model__scheme_options=options).model
    dense = perturbed("dense_former", 5)
    values = {name.replace("scheme.weights", "scheme.b"): p for name, p in dense.named_parameters()}
    with torch.no_grad():
        for name, p in mudd.named_parameters():
            p.copy_(values.pop(name).view(p.shape))
    torch.testing.assert_close(mudd.hidden(TOKENS), dense.hidden(TOKENS), rtol=1e-5, atol=2e-5)
    assert not values


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


@pytest.mark.parametrize("name", ["deepnorm", "hyper_connections", "real_former"])
def test_fused_matrices_are_trained_under_frozen_tables(name: str) -> None:
    """Fused sublayers have a backward pass only if their inputs have a gradient."""
    given = {"train__trainable": ["q", "k", "v", "w1"]}
    fused, plain = built(name, 3, **given), built(name, 3, **given)
    enable_fast_paths(fused.model, FUSED, print)
    enable_fast_paths(plain.model, PLAIN, print)
    ours, expected = gradients(fused, TOKENS), gradients(plain, TOKENS)
    for bank in plain.trained:
        assert (expected[bank.key].flatten(1).norm(dim=1) > 0).all()
        torch.testing.assert_close(ours[bank.key], expected[bank.key], rtol=1e-4, atol=1e-4)
    frozen = {bank.key for bank in fused.banks} - {bank.key for bank in fused.trained}
    assert frozen and not any(found[key].any() for found in (ours, expected) for key in frozen)


@pytest.mark.parametrize("n", [1, 2, 4, 9])
def test_sinkhorn_goes_to_a_doubly_stochastic_matrix(n: int) -> None:
    R = torch.randn(n, n, 50, dtype=torch.float64)
    found = sinkhorn(R, 500)
    sums = torch.cat([found.sum(0), found.sum(1)])
    torch.testing.assert_close(sums, torch.ones_like(sums))
    assert (found > 0).all() and torch.linalg.matrix_norm(found.movedim(2, 0), 2).max() < 1 + 1e-9
    torch.testing.assert_close(sinkhorn(R + 1000, 20), sinkhorn(R, 20))  # no overflow


def test_gpas_scales_the_stream_and_not_its_gradient() -> None:
    layer = perturbed("gpas", 1).layers[0]
    p = pieces(layer, 1, 1)
    with torch.no_grad():
        layer.scheme.gate.fill_(1.5)
    x, R = torch.randn(2, 6, 12, requires_grad=True), torch.randn(2, 6, 12)
    keep = 1 - F.silu(torch.tensor(1.5))
    y = x + p.A(p.a[0](x))
    z = keep * y.detach() + (y - y.detach())  # the value is scaled, the gradient is y's
    expected = z + p.F(p.f[0](z))
    torch.testing.assert_close(layer(x), keep * expected)
    (wanted,) = torch.autograd.grad((expected * R).sum(), x)
    (found,) = torch.autograd.grad((layer(x) * R).sum(), x)
    torch.testing.assert_close(found, wanted)
    (gate,) = torch.autograd.grad((layer(x) * R).sum(), layer.scheme.gate)
    assert gate.abs() > 0


# res_former hands on the values of an attention, which are in bf16
IN_FP32 = [n for n in SCHEMES if SCHEMES[n].maps_stream and n != "res_former"]


@pytest.mark.parametrize("name", [*IN_FP32, "frac_connections"])
def test_the_stream_is_in_full_precision_under_autocast(name: str) -> None:
    """Sublayers round to bf16; their outputs are mixed, weighed and added in fp32."""
    static = {"dynamic": False} if name.endswith("_connections") else {}
    model = perturbed(name, 6, model__scheme_options=static)
    x = torch.randn(2, 6, 12)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = run_layers(model.layers, model.last.enter(x))
    tensors = [t for t in torch.utils._pytree.tree_leaves(found) if torch.is_tensor(t)]
    assert {t.dtype for t in tensors} == {torch.float32}
    given, layer = model.layers[0](model.last.enter(x)), model.layers[1]
    with torch.no_grad():  # sublayers that give nothing: no bf16 at all
        layer.attention.o.zero_(), layer.attention.o_bias.zero_()
        layer.feed_forward.w2.zero_(), layer.feed_forward.w2_bias.zero_()
        whole = layer(given)
        with torch.autocast("cpu", torch.bfloat16):
            half = layer(given)
    torch.testing.assert_close(half[0], whole[0], rtol=1e-6, atol=1e-6)


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
def test_ntk_is_fan_in_with_divided_gradients(choice: dict[str, Any], ways: FastPaths) -> None:
    """Logits equal; gradients of matrices 1/sqrt(n_in) of the others, of all else the same."""
    given = config("pre_ln", 4, **choice)
    ntk = build_model(with_overrides(given, {"model.init.distribution": "ntk"}), vocab_size=11)
    fan_in = build_model(with_overrides(given, {"model.init.fan": "in"}), vocab_size=11)
    tokens = SIDES if ntk.model.source_len else TOKENS
    found: list[dict[str, torch.Tensor]] = []
    for one in (ntk, fan_in):
        enable_fast_paths(one.model, ways, print)
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
    crosses = bool(ntk.model.source_len) and "merged" not in choice.values()
    of_layers = {role for role in MATRICES if crosses or not role.startswith("cross_")}
    assert matrices == of_layers - {"w3"}


def test_backout_takes_a_share_of_the_middle_layer_from_the_last() -> None:
    model = built("x0_lambdas", 5, model__scheme_options={"backout": 0.2}).model
    x = torch.randn(2, 6, D)
    streams = [model.last.enter(x)]
    for layer in model.layers:
        streams.append(layer(streams[-1]))
    last, third = streams[-1][0], streams[3][0]  # nanochat's index 5 // 2, from 0

    def plain(z: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(z, (D,), eps=1e-5)

    expected = plain(last - 0.2 * third)
    torch.testing.assert_close(model.layers[-1].scheme.leave(streams[-1], plain), expected)
