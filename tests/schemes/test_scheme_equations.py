"""Every scheme's layer against its equation, written once more from the paper, number by number."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import scheme_literals as literals
from helpers.scheme_literals import One, enter, norm, stream_into
from helpers.scheme_pieces import HEADS, TOKENS, D, Pieces, built, perturbed, pieces
from torch import Tensor

from deepstack.fast.fuse import fuse
from deepstack.model.stack import run_layers
from deepstack.schemes import SCHEMES


def every(step: Callable[..., Tensor], own: str = "") -> Callable[[Any, Tensor], Tensor]:
    """The same wiring around each sublayer: step(x, G, norms, p).

    own: with a parameter of the scheme for each sublayer, step(x, G, norms, parameter).
    """

    def layer(p: Any, x: Tensor) -> Tensor:
        for name, G, norms in p.each():
            x = step(x, G, norms, getattr(p.s, f"{name}_{own}") if own else p)
        return x

    return layer


def post(x: Tensor, G: One, n: list[One], p: Pieces) -> Tensor:
    return n[0](x + G(x))


def pre(x: Tensor, G: One, n: list[One], p: Pieces) -> Tensor:
    return x + G(n[0](x))


def sub_ln(p: Pieces, x: Tensor) -> Tensor:
    x = x + p.A(p.a[0](x), out=norm(p.slot("before_out")))
    return x + p.F(p.f[0](x), hidden=norm(p.slot("after_activation")))


def norm_former(p: Pieces, x: Tensor) -> Tensor:
    scales = p.slot("heads").scale.view(1, HEADS, 1, 1)
    x = x + norm(p.s.after_attention)(p.A(p.a[0](x), heads=lambda y: scales * y))
    return x + p.F(p.f[0](x), hidden=norm(p.slot("after_activation")))


def hybrid_norm(p: Pieces, x: Tensor) -> Tensor:
    norms = [norm(p.slot(name)) for name in "qkv"]
    y = x + p.A(x, qkv=lambda all_: [n(t) for n, t in zip(norms, all_, strict=True)])
    y = norm(p.s.between)(y)
    return y + p.F(y)


def fixup(p: Pieces, x: Tensor) -> Tensor:
    into, scale, out = p.s.attention_scalars
    x = x + (1 + scale) * p.A(x + into, out=lambda y: y + p.slot("before_out").bias) + out
    into, scale, out = p.s.feed_forward_scalars
    before, after = (p.slot(f"{where}_activation").bias for where in ("before", "after"))
    inner = p.F(x + into, hidden=lambda y: y + after, linear=lambda y: y + before)
    return x + (1 + scale) * inner + out


def b2t(p: Any, x: Tensor) -> Tensor:
    *before, (_, feed_forward, (last,)) = p.each()
    u = x
    for _, G, (n,) in before:
        u = n(u + G(u))
    return last(x + u + feed_forward(u))


def keel(p: Pieces, x: Tensor) -> Tensor:
    alpha = 1 if p.l == 1 else 2 * p.N
    x = alpha * x + p.A(p.a[0](x))
    x = x if p.l == 1 else p.a[1](x)
    return p.f[1](alpha * x + p.F(p.f[0](x)))


def mix_ln(p: Pieces, x: Tensor) -> Tensor:
    return every(post if p.l <= p.N // 4 else pre)(p, x)


def residual(p: Pieces, streams: tuple[Tensor, Tensor], s: float = 1) -> tuple[Tensor, Tensor]:
    x, r = streams
    for _, G, n in p.each():
        f = G(x)
        x, r = n[0](x + f), r + s * f
    return x, r


def dlcl(p: Pieces, stream: tuple[Tensor, tuple[Tensor, ...]]) -> Any:
    x, outputs = stream
    y = literals.pre_ln(p, x)
    outputs = (*outputs, norm(p.s.output_norm)(y))
    mean = sum(outputs) / (p.l + 1)
    return mean + sum(w * o for w, o in zip(p.s.weights, outputs, strict=False)), outputs


def deepnorm(alpha: Callable[[int], float]) -> Callable[[Pieces, Tensor], Tensor]:
    return every(lambda x, G, n, p: n[0](alpha(p.N) * x + G(x)))


def deep_scale_lm(b2: float) -> Callable[[Pieces, Tensor], Tensor]:
    return every(lambda x, G, n, p: math.sqrt(1 - b2) * x + math.sqrt(b2) * G(n[0](x)))


LITERAL: dict[str, Callable[[Pieces, Any], Any]] = {
    **dict.fromkeys(("post_ln", "post_ln_init", "ds_init"), every(post)),
    **dict.fromkeys(("pre_ln", "pre_ln_scaled"), every(pre)),
    **dict.fromkeys(
        ("deepnorm", "deepnorm_tight", "deepnorm_rates", "deepnorm_power"),
        deepnorm(lambda N: (2 * N) ** 0.25),
    ),
    "deepnorm_adam": deepnorm(lambda N: (2 * N) ** 0.5),
    "deepnorm_runtime_beta": every(
        lambda x, G, n, p: n[0]((2 * p.N) ** 0.25 * x + G((8 * p.N) ** -0.25 * x))
    ),
    "branch_norm": every(lambda x, G, n, p: n[0](x + 7 / 4000 * G(x))),  # at step 7
    "b2t": b2t,
    "keel": keel,
    "mix_ln": mix_ln,
    "hybrid_norm": hybrid_norm,
    "residual": residual,
    "dlcl": dlcl,
    **literals.LONG,
    "parallel": lambda p, x: x + p.A(norm(p.s.before_both)(x)) + p.F(norm(p.s.before_both)(x)),
    "res_post_norm": every(lambda x, G, n, p: x + n[0](G(x))),
    "gpas": every(lambda x, G, n, p: (1 - F.silu(p.s.gate)) * (x + G(n[0](x)))),
    "admin": every(lambda x, G, n, omega: n[0](omega * x + G(x)), "omega"),
    "sub_ln": sub_ln,
    "norm_former": norm_former,
    **dict.fromkeys(("sandwich_ln", "peri_ln"), every(lambda x, G, n, p: x + n[1](G(n[0](x))))),
    "ln_scaling": every(lambda x, G, n, p: x + G(n[0](x) / math.sqrt(p.l))),
    "pro_res": every(lambda x, G, n, p: x + 6 / (1000 * p.l) * G(n[0](x))),  # at step 7
    "layer_scale": every(lambda x, G, n, s: x + s * G(n[0](x)), "scale"),
    "depth_mup": every(lambda x, G, n, p: x + (p.N / 2) ** -0.5 * G(n[0](x))),
    "complete_p": every(lambda x, G, n, p: x + (p.N / 2) ** -1 * G(n[0](x))),
    "looped": every(lambda x, G, n, p: x + p.N**-0.5 * G(n[0](x))),
    "deep_scale_lm": lambda p, x: deep_scale_lm(2 / p.N)(p, x),
    "rezero": every(lambda x, G, n, p: x + p.s.scale * G(x)),
    "skip_init": every(lambda x, G, n, a: x + a * G(x), "scale"),
    "t_fixup": every(lambda x, G, n, p: x + G(x)),
    "fixup": fixup,
}


@pytest.mark.parametrize("name", SCHEMES.names())
@pytest.mark.parametrize("depth", [4, 9])
def test_a_layer_is_its_equation(name: str, depth: int) -> None:
    model = perturbed(name, depth)
    torch.manual_seed(2)
    x = torch.randn(2, 6, D)
    for index in {0, 1, 2, depth - 1}:
        layer = model.layers[index]
        stream = stream_into(name, index + 1, x)
        expected = LITERAL[name](pieces(layer, index + 1, depth), stream)
        for fused in (False, True):
            if fused:
                fuse([layer])
            torch.testing.assert_close(layer(stream), expected, rtol=1e-5, atol=2e-5)


# of those in which a decoder's layer is not LITERAL's; slots are inside of its sublayers
DECODER: dict[str, Callable[[Any, Any], Any]] = {
    "deepnorm": deepnorm(lambda M: (3 * M) ** 0.25),
    "sub_ln": every(pre),
    "fixup": every(lambda x, G, n, c: x + (1 + c[1]) * G(x + c[0]) + c[2], "scalars"),
}


@pytest.mark.parametrize(
    "name", [name for name in SCHEMES.names() if "encoder_decoder" in SCHEMES[name].families]
)
def test_a_layer_of_three_sublayers_is_its_equation(name: str) -> None:
    family = {"model__family": "encoder_decoder", "model__decoder_depth": 4}
    model = perturbed(name, 3, **family)
    memory, x = torch.randn(2, 5, D), torch.randn(2, 6, D)
    for l, layer in enumerate(model.decoder.layers, start=1):
        norms = [[norm(n) for n in own] for own in layer.scheme.per_sublayer("norms")]
        each = list(zip(layer.names, layer.bind_memory(memory), norms, strict=True))
        p: Any = SimpleNamespace(s=layer.scheme, l=l, N=4, each=lambda each=each: each)
        stream = stream_into(name, l, x)
        expected = DECODER.get(name, LITERAL[name])(p, stream)
        torch.testing.assert_close(layer(stream, memory), expected, rtol=1e-4, atol=1e-4)


# scheme, options, literal of a stack of 7 layers at step 7
OPTIONS: list[tuple[str, dict[str, Any], Callable[[Pieces, Any], Any]]] = [
    ("mix_ln", {"share": 0.5}, lambda p, x: every(post if p.l <= 3 else pre)(p, x)),
    ("residual", {"s": 0.25}, lambda p, x: residual(p, x, 0.25)),
    ("depth_mup", {"base": 1}, every(lambda x, G, n, p: x + 7**-0.5 * G(n[0](x)))),
    ("complete_p", {"base": 3}, every(lambda x, G, n, p: x + 3 / 7 * G(n[0](x)))),
    ("deepnorm_power", {"power": 0.5}, deepnorm(lambda N: math.sqrt(14))),
    ("branch_norm", {"ramp_steps": 14}, every(lambda x, G, n, p: n[0](x + 0.5 * G(x)))),
    ("deep_scale_lm", {"k": 1.0}, deep_scale_lm(1 / 7)),
    ("deep_scale_lm", {"k": 4.0}, deep_scale_lm(1 / 2)),  # k/N would be 4/7
    ("attn_res", {"blocks": 0}, lambda p, x: literals.attn_res(p, x, blocks=14)),
    ("attn_res", {"blocks": 1}, lambda p, x: literals.attn_res(p, x, blocks=1)),
    ("attn_res", {"blocks": 3}, lambda p, x: literals.attn_res(p, x, blocks=3)),
    ("attn_res", {"blocks": 99}, lambda p, x: literals.attn_res(p, x, blocks=14)),
    ("dense_former", {"dilation": 2}, lambda p, x: literals.dense_former(p, x, 2, 1)),
    ("dense_former", {"period": 3}, lambda p, x: literals.dense_former(p, x, 1, 3)),
    ("dense_former", {"dilation": 3, "period": 2}, lambda p, x: literals.dense_former(p, x, 3, 2)),
    ("mhc", {"iterations": 3}, lambda p, x: literals.mhc(p, x, iterations=3)),
    ("mhc", {"streams": 2}, literals.mhc),
    ("mhc", {"streams": 1}, literals.mhc),
    ("hyper_connections", {"dynamic": False}, literals.hyper_connections),
    ("hyper_connections", {"streams": 3}, literals.hyper_connections),
    ("hyper_connections", {"streams": 1}, literals.hyper_connections),
    ("real_former", {"mean": True}, lambda p, x: literals.real_former(p, x, mean=True)),
    ("res_former", {"first": 2.0, "own": 1.0}, lambda p, x: literals.res_former(p, x, 2, 1)),
    ("res_former", {"first": 1.0, "own": 0.0}, lambda p, x: literals.res_former(p, x, 1, 0)),
    ("res_former", {"learnable": True}, literals.learnable_res_former),
    ("res_former", {"last": 2}, lambda p, x: literals.res_former(p, x, last=2)),
    ("res_former", {"last": 9}, literals.res_former),
    ("laurel", {"rank": 1}, literals.laurel),
    ("laurel", {"rank": 5}, literals.laurel),
    ("frac_connections", {"fractions": 2}, literals.frac_connections),
    ("frac_connections", {"fractions": 6, "dynamic": False}, literals.frac_connections),
    ("frac_connections", {"fractions": 1}, literals.frac_connections),
    ("ngpt", {"start": 0.2}, lambda p, x: literals.ngpt(p, x, start=0.2)),
    ("ngpt", {"start": None}, lambda p, x: literals.ngpt(p, x, start=1 / 7)),
]


@pytest.mark.parametrize(("name", "options", "literal"), OPTIONS)
def test_a_stack_with_options_is_its_equation(
    name: str, options: dict[str, Any], literal: Callable[[Pieces, Any], Any]
) -> None:
    model = perturbed(name, 7, model__scheme_options=options)
    x = torch.randn(2, 6, D)
    stream = model.last.enter(x)
    expected = enter(name, x, options.get("streams", 4), options.get("s", 1))
    for l, layer in enumerate(model.layers, start=1):
        stream, expected = layer(stream), literal(pieces(layer, l, 7), expected)
        torch.testing.assert_close(stream, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("share", "depth", "count"), [(0.29, 100, 29), (0.57, 200, 114)])
def test_mix_lns_share_is_not_lost_to_rounding(share: float, depth: int, count: int) -> None:
    model = built("mix_ln", depth, model__scheme_options={"share": share}).model
    assert sum(scheme.is_post for scheme in model.schemes) == count


@pytest.mark.parametrize("name", SCHEMES.names())
def test_the_stack_begins_and_ends_as_the_scheme_says(name: str) -> None:
    model = perturbed(name, 4)
    x = (model.embedding[TOKENS] + model.position[:6]) * math.sqrt(D / 2)
    if name in ("peri_ln", "dlcl", "mv_split", "x0_lambdas"):
        x = norm(model.last.entry_norm)(x)
    else:
        assert model.last.entry_norm is None
    x = enter(name, x)
    for layer in model.layers:
        x = layer(x)
    without = {
        "post_ln", "post_ln_init", "ds_init", "deepnorm", "deepnorm_tight", "deepnorm_power",
        "deepnorm_adam", "deepnorm_rates", "deepnorm_runtime_beta", "branch_norm", "b2t", "keel",
        "admin", "rezero", "skip_init", "t_fixup", "fixup", "real_former", "mv_split",
        "ngpt",
    }  # fmt: skip
    assert (model.last.final_norm is None) == (name in without)
    if name == "residual":
        x = x[0] + norm(model.last.final_norm)(x[1])
    elif name == "siamese_norm":
        last_of_x, last_of_y = (norm(n) for n in model.last.stream_norms)
        x = norm(model.last.final_norm)(last_of_x(x[0]) + last_of_y(x[1]))
    elif name == "ngpt":
        x = math.sqrt(D) * x
    elif name in ("hyper_connections", "mhc"):
        x = norm(model.last.final_norm)(sum(x[1]))
    else:
        x = x if torch.is_tensor(x) else x[0]
        x = x if model.last.final_norm is None else norm(model.last.final_norm)(x)
    torch.testing.assert_close(model.hidden(TOKENS), x, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["rezero", "skip_init", "fixup"])
def test_the_stack_starts_as_the_identity(name: str) -> None:
    model = built(name, 6).model
    last = run_layers(model.layers, model.last.enter(model.start(TOKENS)))
    assert torch.equal(last, model.start(TOKENS))


def test_admin_is_profiled_as_its_code_does() -> None:
    model = built("admin", 5)
    model.calibrate(TOKENS)
    model.model.requires_grad_(False)
    x, total = model.model.start(TOKENS), None
    for layer in model.model.layers:
        s = layer.scheme
        p = pieces(layer, 0, 0)
        for G, n, omega in ((p.A, p.a, s.attention_omega), (p.F, p.f, s.feed_forward_omega)):
            ratio = 1.0 if total is None else math.sqrt(total)
            torch.testing.assert_close(omega, torch.full((D,), ratio), rtol=1e-5, atol=0)
            f = G(x)
            total = float((ratio * x).var(correction=0) + f.var(correction=0))
            x = n[0](ratio * x + f)
