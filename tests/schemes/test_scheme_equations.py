"""Every scheme's layer against its equation, written once more from the paper, number by number."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.papers import PAPERS
from helpers.scheme_literals import norm
from helpers.scheme_pieces import TOKENS, D, built, perturbed, pieces

from deepstack.fast.fuse import fuse
from deepstack.model.stack import run_layers
from deepstack.schemes import SCHEMES, StackNorm


@pytest.fixture
def double() -> Iterator[None]:
    """Let new tensors have 64 bits: 32 round otherwise on other processors, and streams add up."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("name", "depth", "options"),
    [
        (name, depth, options)
        for name in SCHEMES
        for depth, options in ((4, {}), (9, {}), *((7, one) for one in PAPERS[name].options))
    ],
)
def test_a_layer_is_its_equation(name: str, depth: int, options: dict[str, Any]) -> None:
    model = perturbed(name, depth, model__scheme_options=options).double()
    torch.manual_seed(2)
    x = torch.randn(2, 6, D)
    stream, entry = model.last.enter(x), model.last.entry_norm
    expected = PAPERS[name].enter(norm(entry)(x) if entry else x, **options)
    torch.testing.assert_close(stream, expected)
    for l, layer in enumerate(model.layers, start=1):
        expected = PAPERS[name].layer(pieces(layer, l, depth), stream, **options)
        torch.testing.assert_close(layer(stream), expected, rtol=1e-9, atol=1e-9)
        fuse([layer])
        stream = layer(stream)
        torch.testing.assert_close(stream, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "name", [name for name in SCHEMES.names() if "encoder_decoder" in SCHEMES[name].families]
)
def test_a_layer_of_three_sublayers_is_its_equation(name: str) -> None:
    family = {"model__family": "encoder_decoder", "model__decoder_depth": 4}
    model = perturbed(name, 3, **family).double()
    memory, stream = torch.randn(2, 5, D), model.decoder.enter(torch.randn(2, 6, D))
    equation = PAPERS[name].decoder or PAPERS[name].layer
    for l, layer in enumerate(model.decoder.layers, start=1):
        norms = [[norm(n) for n in own] for own in layer.scheme.per_sublayer("norms")]
        each = list(zip(layer.names, layer.bind_memory(memory), norms, strict=True))
        p: Any = SimpleNamespace(s=layer.scheme, l=l, N=4, each=lambda each=each: each)
        expected = equation(p, stream)
        stream = layer(stream, memory)
        torch.testing.assert_close(stream, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("share", "depth", "count"), [(0.29, 100, 29), (0.57, 200, 114)])
def test_mix_lns_share_is_not_lost_to_rounding(share: float, depth: int, count: int) -> None:
    model = built("mix_ln", depth, model__scheme_options={"share": share}).model
    assert sum(scheme.is_post for scheme in model.schemes) == count


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", SCHEMES)
def test_the_stack_begins_and_ends_as_the_paper_says(name: str) -> None:
    model, paper = perturbed(name, 4).double(), PAPERS[name]
    stack, x = model.last, (model.embedding[TOKENS] + model.position[:6]) * math.sqrt(D / 2)
    assert (stack.entry_norm is not None) == paper.entry_norm
    x = paper.enter(norm(stack.entry_norm)(x) if paper.entry_norm else x)
    for layer in model.layers:
        x = layer(x)
    final = norm(stack.final_norm) if stack.final_norm else None
    if paper.leave:
        expected = paper.leave(x, final, [norm(n) for n in stack.stream_norms])
    else:
        x = x if torch.is_tensor(x) else x[0]
        expected = final(x) if final else x
    torch.testing.assert_close(model.hidden(TOKENS), expected, rtol=1e-9, atol=1e-9)


def is_normed(x: torch.Tensor) -> bool:
    return torch.allclose(x.var(-1, correction=0), torch.ones(x.shape[:-1]), rtol=1e-3)


@pytest.mark.parametrize("name", [name for name in SCHEMES if not PAPERS[name].leave])
def test_f_is_a_norm_s_output_and_not_normed_twice(name: str) -> None:
    """But without norms.  All norms have the gain 1 and the bias 0."""
    model = built(name, 4).model
    F = model.hidden(TOKENS)
    last = run_layers(model.layers, model.last.enter(model.embed(TOKENS)))
    x = last if torch.is_tensor(last) else last[0]
    normalised = SCHEMES[name].normalised
    assert is_normed(F) == normalised == any(isinstance(m, StackNorm) for m in model.modules())
    assert (model.last.final_norm is not None) == (normalised and not is_normed(x))


@pytest.mark.parametrize("name", ["rezero", "skip_init", "fixup"])
def test_the_stack_starts_as_the_identity(name: str) -> None:
    model = built(name, 6).model
    last = run_layers(model.layers, model.last.enter(model.embed(TOKENS)))
    assert torch.equal(last, model.embed(TOKENS))


def test_admin_is_profiled_as_its_code_does() -> None:
    model = built("admin", 5)
    model.calibrate(TOKENS)
    model.model.requires_grad_(False)
    x, total = model.model.embed(TOKENS), None
    for layer in model.model.layers:
        s = layer.scheme
        p = pieces(layer, 0, 0)
        for G, n, omega in ((p.A, p.a, s.attention_omega), (p.F, p.f, s.feed_forward_omega)):
            ratio = 1.0 if total is None else math.sqrt(total)
            torch.testing.assert_close(omega, torch.full((D,), ratio), rtol=1e-5, atol=0)
            f = G(x)
            total = float((ratio * x).var(correction=0) + f.var(correction=0))
            x = n[0](ratio * x + f)
