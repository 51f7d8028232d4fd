"""The statements of the papers on every scheme, written once more: a row each in `PAPERS`."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from helpers import scheme_literals as literals
from helpers.scheme_literals import One, direction, norm
from helpers.scheme_pieces import HEADS, D, Pieces

VALUES = ("v", "o", "w1", "w2")
OUTPUTS = ("o", "w2")
Layer = Callable[..., Any]


class Paper(NamedTuple):
    """A scheme of N layers as its paper has it, at step 7; options go by their names.

    layer: (pieces, stream, **options) -> stream.  decoder: the same of three sublayers, if it is
    another equation.
    gain: (role, l, N) -> factor on a matrix.  alpha: N -> the published coefficient, if any.
    post: N -> a, if a sublayer is LN(a x + G(x)).
    enter, leave: x_0 -> the first layer's stream; (stream, norm, norms of the streams) -> F.
    entry_norm: whether x_0 is normed.  folds: whether linear maps alone read every norm.
    differentiable: whether the gradients are F's.
    kinds: how many kinds of layer a compiler sees; another kind of stream is one too.
    options: values with which `layer` is tested too.
    starts: depth, options, end of the name of a parameter, and the value at which it starts.
    """

    layer: Layer
    decoder: Layer | None = None
    gain: Callable[[str, int, int], float] = lambda r, l, N: 1.0
    alpha: Callable[..., float] | None = None
    post: Callable[..., float] | None = None
    enter: Callable[..., Any] = lambda x, **_: x
    leave: Callable[..., Tensor] | None = None
    entry_norm: bool = False
    folds: bool = False
    differentiable: bool = True
    kinds: int = 1
    options: tuple[dict[str, Any], ...] = ()
    starts: tuple[tuple[int, dict[str, Any], str, float], ...] = ()


def every(step: Callable[..., Tensor], own: str = "") -> Layer:
    """The same wiring around each sublayer: step(x, G, norms, p, **options).

    own: with a parameter of the scheme for each sublayer, step(x, G, norms, parameter).
    """

    def layer(p: Any, x: Tensor, **options: Any) -> Tensor:
        for name, G, norms in p.each():
            x = step(x, G, norms, getattr(p.s, f"{name}_{own}") if own else p, **options)
        return x

    return layer


def pre(factor: Callable[..., float] = lambda p: 1.0, **more: Any) -> Paper:
    """x <- x + factor(p, **options) G(LN(x)), which ends in a norm that a head reads."""
    equation = every(lambda x, G, n, p, **options: x + factor(p, **options) * G(n[0](x)))
    return Paper(equation, folds=True, **more)


def post(alpha: Callable[..., float] | None = None, **more: Any) -> Paper:
    """x <- LN(alpha(N, **options) x + G(x)); without alpha, with 1."""
    a = alpha or (lambda N: 1.0)
    equation = every(lambda x, G, n, p, **options: n[0](a(p.N, **options) * x + G(x)))
    return Paper(equation, alpha=alpha, post=a, **more)


def of(roles: tuple[str, ...], gain: Callable[[int], float]) -> Callable[[str, int, int], float]:
    return lambda r, l, N: gain(N) if r in roles else 1.0


def quarter(N: int) -> float:
    return (2 * N) ** 0.25


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


def t_fixup_gain(r: str, l: int, N: int) -> float:
    return (9 * N) ** -0.25 if r == "embedding" else 0.67 * N**-0.25 if r in VALUES else 1.0


def fixup_gain(r: str, l: int, N: int) -> float:
    powers = {"q": -1 / 6, "k": -1 / 6, "v": -1 / 6, "w1": -1 / 2}
    return 0.0 if r in OUTPUTS else (2 * N) ** powers.get(r, 0)


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


def mix_ln(p: Pieces, x: Tensor, share: float = 0.25) -> Tensor:
    return (post() if p.l <= share * p.N else pre()).layer(p, x)


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


def deep_scale_lm(x: Tensor, G: One, n: list[One], p: Pieces, k: float = 2) -> Tensor:
    b2 = min(k / p.N, 1 / 2)
    return math.sqrt(1 - b2) * x + math.sqrt(b2) * G(n[0](x))


def with_streams(x: Tensor, streams: int = 4, **_: Any) -> Any:
    return x, torch.stack([x] * streams)


DEEPNORM = of(VALUES, lambda N: (8 * N) ** -0.25)
SCALED_OUTPUTS = of(OUTPUTS, lambda N: 1 / math.sqrt(2 * N))


class Papers(dict[str, Paper]):
    """Rows by the name of the scheme; a missing one is named with the recipe."""

    def __missing__(self, name: str) -> Paper:
        raise KeyError(
            f"the scheme {name!r} has no row in PAPERS of tests/helpers/papers.py; its equation "
            "belongs there, as docs/extending/scheme.md says"
        )


PAPERS = Papers({
    "post_ln": post(),
    "post_ln_init": post(gain=lambda r, l, N: 1 / (N - l + 1) if l else 1.0),
    "ds_init": post(gain=lambda r, l, N: l**-0.5 if l else 1.0),
    "deepnorm": post(
        quarter, gain=DEEPNORM, decoder=every(lambda x, G, n, p: n[0]((3 * p.N) ** 0.25 * x + G(x)))
    ),
    "deepnorm_rates": post(quarter, gain=DEEPNORM),
    "deepnorm_tight": post(quarter, gain=of(VALUES, lambda N: (2 * N) ** -0.25)),
    "deepnorm_adam": post(lambda N: (2 * N) ** 0.5, gain=of(VALUES, lambda N: (2 * N) ** -0.5)),
    "deepnorm_power": post(
        lambda N, power=0.25: (2 * N) ** power, gain=DEEPNORM, options=({"power": 0.5},)
    ),
    "deepnorm_runtime_beta": Paper(
        every(lambda x, G, n, p: n[0](quarter(p.N) * x + G((8 * p.N) ** -0.25 * x))), alpha=quarter
    ),
    "branch_norm": Paper(
        every(lambda x, G, n, p, ramp_steps=4000: n[0](x + 7 / ramp_steps * G(x))),
        options=({"ramp_steps": 14},),
    ),
    "b2t": Paper(b2t),
    "keel": Paper(keel, alpha=lambda N: 2 * N, kinds=2),
    "mv_split": Paper(literals.mv_split, entry_norm=True, starts=(
        (2, {}, "_mean", 0.0), (2, {"mean": 0.5}, "_mean", 0.5), (2, {}, "_centred", 0.03),
    )),
    "admin": Paper(every(lambda x, G, n, omega: n[0](omega * x + G(x)), "omega"), starts=(
        (6, {"start": "log"}, "_omega", math.sqrt(13 / math.log(13) - 1)),
        (6, {"start": "one"}, "_omega", math.sqrt(12)),
        (6, {"start": "linear"}, "_omega", 1.0),
    )),
    "real_former": Paper(
        literals.real_former, enter=lambda x, **_: (x, None), kinds=2, options=({"mean": True},)
    ),
    "ngpt": Paper(
        literals.ngpt, enter=lambda x, **_: direction(x),
        leave=lambda x, norm, norms: math.sqrt(D) * x, options=({"start": 0.2}, {"start": None}),
        starts=tuple((3, {"start": start}, "_alpha", D**-0.5) for start in (0.2, None)),
    ),
    "mix_ln": Paper(mix_ln, kinds=2, options=({"share": 0.5},)),
    "hybrid_norm": Paper(hybrid_norm),
    "residual": Paper(
        residual, enter=lambda x, s=1: (x, s * x),
        leave=lambda stream, norm, norms: stream[0] + norm(stream[1]), options=({"s": 0.25},),
    ),
    "siamese_norm": Paper(
        literals.siamese_norm, enter=lambda x: (x, x), kinds=2,
        leave=lambda stream, norm, norms: norm(norms[0](stream[0]) + norms[1](stream[1])),
    ),
    "pre_ln": pre(),
    "pre_ln_scaled": pre(gain=SCALED_OUTPUTS),
    "orthogonal_update": Paper(every(literals.orthogonal_update), folds=True),
    "deep_delta": Paper(
        every(literals.deep_delta, "delta"), gain=of(OUTPUTS, lambda N: N**-0.5),
    ),
    "sub_ln": Paper(
        sub_ln, gain=of(VALUES, lambda N: math.sqrt(math.log(2 * N))), folds=True,
        decoder=pre().layer,  # slots are inside of its sublayers
    ),
    "norm_former": Paper(norm_former),
    "sandwich_ln": Paper(every(lambda x, G, n, p: x + n[1](G(n[0](x)))), gain=SCALED_OUTPUTS),
    "peri_ln": Paper(every(lambda x, G, n, p: x + n[1](G(n[0](x)))), entry_norm=True),
    "parallel": Paper(
        lambda p, x: x + p.A(norm(p.s.before_both)(x)) + p.F(norm(p.s.before_both)(x)), folds=True
    ),
    "res_post_norm": Paper(
        every(lambda x, G, n, p: x + n[0](G(x))),
        starts=((2, {"start": 0.25}, "_norms.0.gain", 0.25),),
    ),
    "ln_scaling": Paper(every(lambda x, G, n, p: x + G(n[0](x) / math.sqrt(p.l))), folds=True),
    "layer_scale": Paper(
        every(lambda x, G, n, s: x + s * G(n[0](x)), "scale"), folds=True,
        starts=tuple(
            (N, options, "_scale", s) for N, options, s in (
                (18, {}, 0.1), (19, {}, 1e-5), (24, {}, 1e-5), (25, {}, 1e-6),
                (6, {"start": 0.3}, 0.3),
            )
        ),
    ),
    "depth_mup": pre(lambda p, base=2: (p.N / base) ** -0.5, options=({"base": 1},)),
    "complete_p": pre(lambda p, base=2: base / p.N, options=({"base": 3},)),
    "looped": pre(lambda p: p.N**-0.5),
    "parcae": Paper(
        lambda p, x: literals.parcae(p, x, p.l == 1, p.l == 1), enter=lambda x, **_: (x, x),
        kinds=2,
        starts=(
            (2, {}, ".injection_a", 0.0), (2, {}, ".injection_d", math.log(math.sqrt(5) - 1)),
        ),
    ),
    "pro_res": pre(lambda p: 6 / (1000 * p.l)),
    "deep_scale_lm": Paper(
        every(deep_scale_lm), alpha=lambda N: math.sqrt(1 - 2 / N), folds=True,
        options=({"k": 1.0}, {"k": 4.0}),
    ),
    "gpas": Paper(
        every(lambda x, G, n, p: (1 - F.silu(p.s.gate)) * (x + G(n[0](x)))), folds=True,
        differentiable=False,
    ),
    "laurel": Paper(literals.laurel, folds=True, options=({"rank": 1}, {"rank": 5})),
    "frac_connections": Paper(
        literals.frac_connections,
        options=({"fractions": 2}, {"fractions": 6, "dynamic": False}, {"fractions": 1}),
    ),
    "hyper_connections": Paper(
        literals.hyper_connections, enter=with_streams, kinds=2,
        leave=lambda stream, norm, norms: norm(sum(stream[1])),
        options=({"dynamic": False}, {"streams": 3}, {"streams": 1}),
    ),
    "mhc": Paper(
        literals.mhc, enter=with_streams, folds=True, kinds=2,
        leave=lambda stream, norm, norms: norm(sum(stream[1])),
        options=(
            {"iterations": 3}, {"streams": 2}, {"streams": 1}, {"mixing": "identity"},
            {"mixing": "permutations", "streams": 3}, {"mixing": "kronecker"},
            {"mixing": "kronecker", "streams": 2}, {"mixing": "cayley"},
        ),
    ),
    "dlcl": Paper(dlcl, enter=lambda x, **_: (x, (x,)), entry_norm=True),
    "dense_former": Paper(
        literals.dense_former, enter=lambda x, **_: (x, (x,)), folds=True,
        options=({"dilation": 2}, {"period": 3}, {"dilation": 3, "period": 2}),
    ),
    "mudd": Paper(
        literals.mudd, enter=lambda x, multiway=True, **_: (*[x] * (4 if multiway else 1), x, (x,)),
        options=(
            {"dynamic": False}, {"multiway": False}, {"multiple": 0}, {"norms": True},
            {"dynamic": False, "multiway": False, "norms": True},
        ),
        starts=(
            (3, {}, ".b", 0.0), (3, {}, ".w_2", 0.0), (3, {"norms": True}, ".sum_norm.gain", 1e-3),
        ),
    ),
    "attn_res": Paper(
        literals.attn_res, enter=lambda x, **_: (x, None, (x,)), folds=True,
        options=tuple({"blocks": blocks} for blocks in (0, 1, 3, 99)),
    ),
    "x0_lambdas": Paper(
        literals.x0_lambdas, entry_norm=True, kinds=2,
        enter=lambda x, backout=0, **_: (x, x, x) if backout else (x, x),
        leave=lambda stream, norm, norms: norm(stream[0]),
        options=({"backout": 0.2}, {"r_last": 0.5, "start_last": 0.3}),
        starts=((2, {"start": 0.1}, ".s", 0.1), (1, {"r_first": 1.15, "r_last": 1.05}, ".r", 1.15)),
    ),
    "res_former": Paper(
        literals.res_former, enter=lambda x, **_: (x, None), folds=True, kinds=2,
        options=(
            {"first": 2.0, "own": 1.0}, {"first": 1.0, "own": 0.0}, {"learnable": True},
            {"last": 2}, {"last": 9},
        ),
        starts=tuple((4, {"learnable": True}, end, 0.5) for end in (".of_first", ".of_own")),
    ),
    "rezero": Paper(every(lambda x, G, n, p: x + p.s.scale * G(x))),
    "skip_init": Paper(every(lambda x, G, n, a: x + a * G(x), "scale")),
    "t_fixup": Paper(every(lambda x, G, n, p: x + G(x)), gain=t_fixup_gain),
    "fixup": Paper(
        fixup, gain=fixup_gain,
        decoder=every(lambda x, G, n, c: x + (1 + c[1]) * G(x + c[0]) + c[2], "scalars"),
    ),
})  # fmt: skip
