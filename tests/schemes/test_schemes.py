"""Every scheme against its paper: equation, coefficients, initial standard deviations."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.sampling import some
from helpers.scheme_pieces import TOKENS, D, built, config, same

from deepstack.errors import PluginError
from deepstack.model import build_model, check_scheme
from deepstack.model.initialise import IN_LAYERS
from deepstack.schemes import SCHEMES, Scheme
from deepstack.schemes.tap import with_tap
from deepstack.training import make_optimizer

DEPTHS = (6, 12, 18, 100, 200, 1000)
PUBLISHED = [(name, family) for name in SCHEMES.names() for family in SCHEMES[name].families]


# scheme -> gain of a matrix (role, l, N), from the papers; what is not here starts with gain 1
GAINS: dict[str, Callable[[str, int, int], float]] = {
    "post_ln_init": lambda r, l, N: 1 / (N - l + 1),
    "ds_init": lambda r, l, N: l**-0.5,
    "deepnorm": lambda r, l, N: (8 * N) ** -0.25 if r in VALUES else 1.0,
    "deepnorm_power": lambda r, l, N: (8 * N) ** -0.25 if r in VALUES else 1.0,
    "deepnorm_rates": lambda r, l, N: (8 * N) ** -0.25 if r in VALUES else 1.0,
    "deepnorm_tight": lambda r, l, N: (2 * N) ** -0.25 if r in VALUES else 1.0,
    "deepnorm_adam": lambda r, l, N: (2 * N) ** -0.5 if r in VALUES else 1.0,
    "sub_ln": lambda r, l, N: math.sqrt(math.log(2 * N)) if r in VALUES else 1.0,
    "sandwich_ln": lambda r, l, N: 1 / math.sqrt(2 * N) if r in ("o", "w2") else 1.0,
    "pre_ln_scaled": lambda r, l, N: 1 / math.sqrt(2 * N) if r in ("o", "w2") else 1.0,
    "t_fixup": lambda r, l, N: 0.67 * N**-0.25 if r in VALUES else 1.0,
    "fixup": lambda r, l, N: {
        "o": 0.0, "w2": 0.0, "w1": (2 * N) ** -0.5,
    }.get(r, (2 * N) ** (-1 / 6)),
}  # fmt: skip
VALUES = ("v", "o", "w1", "w2")

# scheme -> alpha at these depths; the others have none
QUARTER = (1.8612, 2.2134, 2.4495, 3.7606, 4.4721, 6.6874)  # (2N)^(1/4)
ALPHAS = {
    **dict.fromkeys(("deepnorm", "deepnorm_tight", "deepnorm_rates", "deepnorm_power"), QUARTER),
    "deepnorm_runtime_beta": QUARTER,
    "deepnorm_adam": (3.4641, 4.8990, 6.0, 14.1421, 20.0, 44.7214),
    "keel": (12, 24, 36, 200, 400, 2000),
    "deep_scale_lm": (0.81650, 0.91287, 0.94281, 0.98995, 0.99499, 0.99900),
}


@pytest.mark.parametrize("name", SCHEMES.names())
def test_alpha_is_the_published_one(name: str) -> None:
    found = [SCHEMES[name].alpha(depth) for depth in DEPTHS]
    assert found == (pytest.approx(ALPHAS[name], rel=2e-5) if name in ALPHAS else [None] * 6)


@pytest.mark.parametrize("name", SCHEMES.names())
def test_gains_are_the_papers(name: str) -> None:
    wanted = GAINS.get(name, lambda r, l, N: 1.0)
    for depth in DEPTHS:
        for layer in (1, 2, depth):
            for role in IN_LAYERS:
                found = SCHEMES[name].gain(role, layer, depth)
                assert found == pytest.approx(wanted(role, layer, depth)), (role, layer, depth)
    for role in ("position", "head"):
        assert SCHEMES[name].gain(role, 0, 100) == 1.0
    table = 900**-0.25 if name == "t_fixup" else 1.0
    assert SCHEMES[name].gain("embedding", 0, 100) == pytest.approx(table)


@pytest.mark.parametrize(("name", "family"), PUBLISHED)
def test_a_scheme_that_returns_no_tensor_is_refused(
    name: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme, given = SCHEMES[name], config(name, 5, model__family=family)
    check_scheme(given)
    calls_residual = scheme.residual is not Scheme.residual
    method, wrap = ("residual", with_tap) if calls_residual else ("layer", same)
    original = getattr(scheme, method)
    monkeypatch.setattr(scheme, method, wrap(lambda *args, **more: [original(*args, **more)]))
    with pytest.raises(PluginError, match=f"the scheme {name}: .*{method} gave list"):
        check_scheme(given)


def test_options_choose_the_other_reading() -> None:
    half = SCHEMES["ds_init"].configure({"exponent": 0.25, "scale": 0.5})
    assert half.gain("v", 16, 20) == pytest.approx(0.25)
    value_path = SCHEMES["post_ln_init"].configure({"matrices": "value_path"})
    assert [value_path.gain(role, 2, 9) for role in "qv"] == [1, 1 / 8]
    sandwich_ln = SCHEMES["sandwich_ln"].configure({"start": "plain"})
    assert {sandwich_ln.gain(role, 1, 50) for role in IN_LAYERS} == {1.0}
    assert SCHEMES["b2t"].configure({"rescale": True}).gain("q", 2, 16) == 0.25
    hyper_connections = SCHEMES["hyper_connections"].configure({"output_gain": 2.0})
    assert [hyper_connections.gain(role, 1, 5) for role in ("v", "o", "w2")] == [1, 2, 2]
    for p in (0.0, 0.3, 0.5):  # on the curve 2N (v² + w²) / alpha² = 1
        power = SCHEMES["deepnorm_power"].configure({"power": p})
        alpha, beta = power.alpha(50), power.beta(50)
        assert 2 * 50 * 2 * beta**2 / alpha**2 == pytest.approx(1)


@pytest.mark.parametrize(("name", "power", "of_sgd"), [("depth_mup", 0.5, 0), ("complete_p", 1, 1)])
def test_learning_rates_and_epsilons_follow_depth(name: str, power: float, of_sgd: float) -> None:
    m = 100 / 4
    for role in ("q", "w2", "bias", "norm_gain"):
        lr, decay, eps = SCHEMES[name].configure({"base": 4}).optim(role, 100)
        assert (lr, decay, eps) == (pytest.approx(m ** (power - 1)), 1.0, pytest.approx(m**-power))
    given = config(name, 100, train__weight_decay=0.1)
    groups = make_optimizer(given.train, build_model(given, vocab_size=11)).param_groups
    inside = (50 ** (power - 1), 1e-8 * 50**-power)
    assert {(g["factor"], g["eps"]) for g in groups} == {(1.0, 1e-8), inside}
    optim = built(name, 100, train__optimizer="sgd").optim
    assert optim("w1") == (pytest.approx(50**of_sgd), 1.0, 1.0)
    assert optim("head") == (1.0, 1.0, 1.0)


STARTS: list[tuple[str, int, dict[str, Any], str, float]] = [
    *(("layer_scale", N, {}, "_scale", s) for N, s in ((18, 0.1), (19, 1e-5), (24, 1e-5))),
    ("layer_scale", 25, {}, "_scale", 1e-6),
    ("layer_scale", 6, {"start": 0.3}, "_scale", 0.3),
    ("mv_split", 2, {}, "_mean", 0.0),
    ("mv_split", 2, {"mean": 0.5}, "_mean", 0.5),
    ("mv_split", 2, {"mean": 0.5}, "_centred", 0.03),
    ("x0_lambdas", 2, {"start": 0.1}, ".s", 0.1),
    ("res_post_norm", 2, {"start": 0.25}, "_norms.0.gain", 0.25),
    *(("ngpt", 3, {"start": start}, "_alpha", D**-0.5) for start in (0.2, None)),
    ("admin", 6, {"start": "log"}, "_omega", math.sqrt(13 / math.log(13) - 1)),
    ("admin", 6, {"start": "one"}, "_omega", math.sqrt(12)),
    ("admin", 6, {"start": "linear"}, "_omega", 1.0),
    ("res_former", 4, {"learnable": True}, ".of_first", 0.5),
    ("res_former", 4, {"learnable": True}, ".of_own", 0.5),
]


@pytest.mark.parametrize(("name", "depth", "options", "ending", "value"), STARTS)
def test_trained_values_start_where_options_and_depth_say(
    name: str, depth: int, options: dict[str, Any], ending: str, value: float
) -> None:
    model = built(name, depth, model__scheme_options=options)
    model.calibrate(TOKENS)
    state = model.banks.state().items()
    starts = [values for key, values in state if ".scheme." in key and key.endswith(ending)]
    assert starts and all((values == torch.tensor(value)).all() for values in starts)


ENCODERS = product(
    SCHEMES.names(), ["encoder"], [6, 60], ["in_out", "in"], ["xavier_normal", "xavier_uniform"]
)
OTHERS = [(name, f, 4, "in_out", "xavier_normal") for name, f in PUBLISHED if f != "encoder"]


@pytest.mark.parametrize(
    ("name", "family", "depth", "fan", "distribution"), [*some(ENCODERS, 11), *some(OTHERS, 4)]
)
def test_initial_standard_deviations(
    name: str, family: str, depth: int, fan: str, distribution: str
) -> None:
    init = {"model__init__fan": fan, "model__init__distribution": distribution}
    given = config(name, depth, model__family=family, model__d_model=48, model__d_ff=96, **init)
    model = build_model(given, vocab_size=40)
    shapes = {"w1": (48, 96), "w2": (96, 48)}  # n_in, n_out
    matrices = set()
    for bank in model.banks:
        for role, (values,) in bank.by_role():
            start = {"zero": 0.0, "one": 1.0}.get(bank.start, bank.start)
            if isinstance(start, float):
                assert (values == torch.tensor(start)).all()
            elif start == "table":
                std = next(iter(model.schemes.values())).gain(role, 0) * 48**-0.5
                assert values.std().item() == pytest.approx(std, rel=6 / values.numel() ** 0.5)
            else:
                matrices.add((bank.stack, role))
                n_in, n_out = shapes.get(role, (48, 48))
                variance = 2 / (n_in + n_out) if fan == "in_out" else 1 / n_in
                if name == "ngpt":  # vectors along the stream have norm 1, however they started
                    variance = 1 / 48
                for layer in (1, depth):
                    wanted = model.schemes[bank.stack].gain(role, layer) * math.sqrt(variance)
                    row = values[layer - 1]
                    # the relative error of a standard deviation of n normal numbers is 1/sqrt(2n)
                    tolerance = 5 / math.sqrt(2 * row.numel())
                    assert row.std().item() == pytest.approx(wanted, rel=tolerance), (role, layer)
                    assert abs(row.mean().item()) <= 5 * wanted / math.sqrt(row.numel())
                    if distribution == "xavier_uniform" and name != "ngpt":
                        assert row.abs().max().item() <= math.sqrt(3) * wanted * 1.000001
    both = {("encoder", "v"), ("decoder", "cross_v")}
    assert matrices >= (both if family == "encoder_decoder" else {(family, "v")})


DEEP = [
    *some([(name, 100) for name in SCHEMES.names()], 3, 1),
    ("deepnorm", 1000),
    *[pytest.param(name, 1000, marks=pytest.mark.slow) for name in SCHEMES.names()],
]


@pytest.mark.parametrize(("name", "depth"), DEEP)
def test_many_layers_are_finite_forward_and_backward(name: str, depth: int) -> None:
    model = built(name, depth, model__d_ff=12)
    loss = F.cross_entropy(model.model(TOKENS).flatten(0, 1), TOKENS.flatten())
    loss.backward()
    assert torch.isfinite(loss)
    for bank in model.banks:
        assert torch.isfinite(bank.gradients()).all(), bank.key


def test_the_equation_shown_to_users_is_the_docstrings_first() -> None:
    assert SCHEMES["deepnorm"].equation == "x <- LN(alpha x + G(x)), alpha = (2N)^(1/4)"
    assert SCHEMES["pre_ln"].equation == "x <- x + G(LN(x))"


@pytest.mark.parametrize(("name", "family"), PUBLISHED)
def test_what_a_gpu_computes_at_once_is_the_scheme_s_own_sum(name: str, family: str) -> None:
    schemes = built(name, 3, model__family=family).model.schemes
    torch.manual_seed(0)
    x, g = torch.randn(2, 3, D), torch.randn(2, 3, D)
    found = [scheme.post_scale() for scheme in schemes]
    for scheme, a in zip(schemes, found, strict=True):
        if a is not None:
            assert not scheme.changes_by_step
            z = scheme.residual(x, lambda u: g if u is x else None, lambda z: z)
            assert torch.allclose(z, a * x + g)
    assert (found[0] is not None) == (name in POST)


POST = (
    "post_ln", "post_ln_init", "ds_init", "deepnorm", "deepnorm_power", "deepnorm_rates",
    "deepnorm_tight", "deepnorm_adam",
)  # fmt: skip


def test_a_subclass_declares_for_itself() -> None:
    assert all(scheme.static for _, scheme in SCHEMES.items())

    class Half(SCHEMES["post_ln"], name="half", label="Half", paper="none"):  # type: ignore[misc]
        """x <- LN(x + G(x) / 2)."""

        def residual(self, x: torch.Tensor, G: Any, norm: Any) -> torch.Tensor:
            return norm(x + G(x) / 2)

    class Same(SCHEMES["deepnorm"], name="same", label="Same", paper="none"):  # type: ignore[misc]
        """x <- LN(alpha x + G(x))."""

    class Grows(SCHEMES["deepnorm"], name="grows", label="Grows", paper="none"):  # type: ignore[misc]
        """x <- LN(alpha_t x + G(x))."""

        def at_step(self, step: int) -> None:
            self.coefficient = 1.0 + step

    assert not Same.static
    for name, inherits in (("half", False), ("same", True), ("grows", False)):
        assert (built(name, 2).model.schemes[0].post_scale() is not None) is inherits
