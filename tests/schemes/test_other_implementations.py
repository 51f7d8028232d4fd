"""Schemes against other people's code, with the same weights: `python -m pytest -m others`.

The other packages come from `pip install -c constraints.txt -e '.[test,bench]'`; the tests of
one that is missing are skipped.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.others_stacks import (
    ATTENTION_BIASES,
    FLAGS,
    PAIRS,
    ROLES,
    TOKENS,
    WIRINGS,
    D,
    by_torchscale,
    by_x_transformers,
    config_of,
    model_of,
    package,
    torchscale,
)  # fmt: skip
from torch import Tensor

from benchmarks.peers.peers import import_library
from deepstack.schemes import stack_schemes
from deepstack.schemes.hyper_connections import mix

pytestmark = pytest.mark.others

# largest difference over largest number, of F and of every gradient, in double precision
TOLERANCE = 1e-10


def difference(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    return float((found - expected).abs().max() / expected.abs().max())


def assert_same(model: Any, ours: Tensor, theirs: Tensor, without: tuple[str, ...] = ()) -> None:
    """F and the gradients of every parameter of ours, through ours and through theirs.

    without: ends of names of parameters that theirs has not.
    """
    named = {name: p for name, p in model.named_parameters() if not name.startswith("head")}
    torch.manual_seed(3)
    way = torch.randn_like(ours)

    def gradients(F: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad((way * F).sum(), tuple(named.values()), allow_unused=True)

    found = {"F": difference(ours, theirs)}
    for name, own, other in zip(named, gradients(ours), gradients(theirs), strict=True):
        if own is None or other is None:
            assert other is None, name
            assert own is None or (without and name.endswith(without)), name
        else:
            found[name] = difference(own, other)
    assert len(found) > 10
    worst = max(found, key=found.__getitem__)
    assert found[worst] <= TOLERANCE, f"{worst}: {found[worst]:.1e}"


# -- torchscale ------------------------------------------------------------------------------------

FAMILIES = ["encoder", "decoder", "encoder_decoder"]


def torchscale_case(scheme: str, family: str, depth: int) -> tuple[Any, list[Any]]:
    """Our configuration and their stacks; with two of them the decoder has a layer less."""
    both = family == "encoder_decoder"
    decoder = {"model__decoder_depth": depth - 1} if both else {}
    config = config_of(scheme, depth, model__family=family, **decoder)
    return config, torchscale(FLAGS[scheme], family, depth, depth - 1 if both else depth)


@pytest.mark.parametrize("depth", [3, 7])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", FLAGS)
def test_torchscale_computes_the_same(scheme: str, family: str, depth: int) -> None:
    config, stacks = torchscale_case(scheme, family, depth)
    model = model_of(config)
    ours = model.hidden(PAIRS if len(stacks) == 2 else TOKENS)
    assert_same(model, ours, by_torchscale(model, stacks))


@pytest.mark.parametrize("depth", [2, 12, 100])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", ["deepnorm", "sub_ln"])
def test_torchscale_scales_the_same_matrices(scheme: str, family: str, depth: int) -> None:
    """Return their start over their start under the same seed without the scheme.

    Only the scale is compared: beneath it theirs has nn.Linear's U(±1/sqrt(n_in)), ours Xavier.  It
    scales the biases of these maps too, which start away from 0 there and at 0 here.

    One scale is another: the encoder of DeepNorm's encoder-decoder starts at 1.15 (N^4 M)^(-1/16)
    there, dividing by (N^4 M)^(1/16) / 1.15, and at 0.87 (N^4 M)^(-1/16) in the paper and here;
    0.87 is about 1/1.15, so that theirs is the constant upside down.
    """
    config, scaled = torchscale_case(scheme, family, depth)
    plain = torchscale(FLAGS["pre_ln"], family, depth, config.model.decoder_depth or depth)
    for (side, own), after, before in zip(
        stack_schemes(config).items(), scaled, plain, strict=True
    ):
        N, where = len(after.layers), (family, side)
        upside_down = scheme == "deepnorm" and where == ("encoder_decoder", "encoder")
        alpha = own.alpha if scheme == "deepnorm" else 1.0
        assert [layer.alpha for layer in after.layers] == pytest.approx([alpha] * N)
        found, seen = dict(after.named_parameters()), set()
        for name, start in before.named_parameters():
            role = ROLES.get(".".join(name.split(".")[2:-1]))
            if role is None:
                assert "layer_norm" in name
                continue
            seen.add(role)
            gain = own.gain(role, int(name.split(".")[1]) + 1)
            if gain != 1.0 and upside_down:
                gain *= 1.15 / 0.87
            torch.testing.assert_close(found[name], gain * start, rtol=1e-6, atol=0)
        crosses = where == ("encoder_decoder", "decoder")
        assert seen == {r for r in ROLES.values() if crosses or not r.startswith("cross")}


# -- x-transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [3, 7])
@pytest.mark.parametrize("family", ["encoder", "decoder"])
@pytest.mark.parametrize("name", WIRINGS)
def test_x_transformers_computes_the_same(name: str, family: str, depth: int) -> None:
    wiring = WIRINGS[name]
    changes = {"model__family": family, "model__norm__bias": False, **wiring.ours}
    config = config_of(name.split()[0], depth, **changes)
    model = model_of(config, attention_bias=False)
    theirs = by_x_transformers(model, wiring, depth)
    assert_same(model, model.hidden(TOKENS), theirs, ATTENTION_BIASES)


# -- admin-torch -----------------------------------------------------------------------------------

# what our option calls their output change; as_module takes the number of sublayers first
ADMIN = {"log": "O(logn)", "one": "O(1)", "linear": "O(n)"}


@pytest.mark.parametrize("depth", [1, 2, 6, 18])
@pytest.mark.parametrize("start", ADMIN)
def test_admin_torch_computes_the_same(start: str, depth: int) -> None:
    """x <- LN(omega x + G(x)), omega theirs and started by theirs, G and LN ours."""
    admin_torch = package("admin_torch")
    model = model_of(config_of("admin", depth, model__scheme_options={"start": start}), moved=False)
    model.calibrate(TOKENS)
    x = model.embed(TOKENS)
    for layer in model.layers:
        s = layer.scheme
        for G, norms, omega in (
            (layer.attention, s.attention_norms, s.attention_omega),
            (layer.feed_forward, s.feed_forward_norms, s.feed_forward_omega),
        ):
            theirs = admin_torch.as_module(2 * depth, ADMIN[start], as_parameter=True, embed_dim=D)
            torch.testing.assert_close(omega.float(), theirs.omega, rtol=1e-6, atol=0)
            x = norms[0](theirs(x, G(x)))
    assert difference(model.hidden(TOKENS), x) < 1e-6


# -- Hugging Face ----------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("iterations", [1, 5, 20])
def test_deepseek_v4_mixes_streams_as_mhc_does(streams: int, iterations: int) -> None:
    """The same A_m, A_r and B for the same weights; without its epsilons."""
    options = {"streams": streams, "iterations": iterations}
    model = model_of(config_of("mhc", 2, model__scheme_options=options))
    library = package("transformers.models.deepseek_v4.modeling_deepseek_v4", import_library)
    n = streams
    given = SimpleNamespace(
        hc_mult=n, hc_sinkhorn_iters=iterations, hc_eps=0.0, rms_norm_eps=1e-6, hidden_size=D
    )
    theirs = library.DeepseekV4HyperConnection(given)
    streams_last = torch.randn(2, 6, n, D)
    H = streams_last.permute(2, 0, 1, 3).double()
    for own in (c for s in model.schemes for c in s.each("connections")):
        with torch.no_grad():
            W, bias = own.map.permute(1, 0, 2).flatten(1), own.begin + own.bias
            order = torch.arange(n * (n + 2))  # its matrix is ours, transposed
            order[2 * n :] = order[2 * n :].view(n, n).T.flatten()
            theirs.fn.copy_(W[order]), theirs.base.copy_(bias[order])
            theirs.scale.copy_(own.scale)
            B, combined, read = theirs(streams_last)
            A, ours = own(H)
            mixed = mix(A, H)
        assert difference(mixed[0], read) < 1e-5
        expected = (combined.transpose(-1, -2) @ streams_last).permute(2, 0, 1, 3)
        assert difference(mixed[1:], expected) < 1e-5
        assert difference(ours[..., 0], B.permute(2, 0, 1)) < 1e-5
