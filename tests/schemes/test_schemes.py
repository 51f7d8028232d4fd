"""Every scheme against its paper: equation, coefficients, initial standard deviations."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.papers import PAPERS
from helpers.sampling import some
from helpers.scheme_pieces import TOKENS, D, built, config, same

from deepstack.base.errors import PluginError
from deepstack.model import build_model, check_scheme
from deepstack.model.initialise import IN_LAYERS
from deepstack.schemes import SCHEMES, Scheme
from deepstack.schemes.tap import with_tap
from deepstack.training import make_optimizer

DEPTHS = (6, 12, 18, 100, 200, 1000)
PUBLISHED = [(name, family) for name in SCHEMES.names() for family in SCHEMES[name].families]


@pytest.mark.parametrize("name", SCHEMES.names())
def test_alpha_and_gains_are_the_papers(name: str) -> None:
    scheme, paper = SCHEMES[name], PAPERS[name]
    outside = [(role, 0) for role in ("embedding", "position", "head")]
    for depth in DEPTHS:
        assert scheme.alpha(depth) == (paper.alpha and pytest.approx(paper.alpha(depth)))
        for role, layer in (*outside, *product(IN_LAYERS, (1, 2, depth))):
            wanted = paper.gain(role, layer, depth)
            assert scheme.gain(role, layer, depth) == pytest.approx(wanted), (role, layer, depth)


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


@pytest.mark.parametrize(
    ("name", "options", "layer", "depth", "gains"),
    [
        ("ds_init", {"exponent": 0.25, "scale": 0.5}, 16, 20, {"v": 0.25}),
        ("ds_init", {}, 4, 9, dict.fromkeys(("cross_q", "cross_k", "cross_v", "cross_o"), 0.5)),
        ("post_ln_init", {"matrices": "value_path"}, 2, 9, {"q": 1, "v": 1 / 8}),
        ("sandwich_ln", {"start": "plain"}, 1, 50, dict.fromkeys(IN_LAYERS, 1)),
        ("b2t", {"rescale": True}, 2, 16, {"q": 0.25}),
        ("hyper_connections", {"output_gain": 2.0}, 1, 5, {"v": 1, "o": 2, "w2": 2}),
    ],
)
def test_options_choose_other_gains(
    name: str, options: dict[str, Any], layer: int, depth: int, gains: dict[str, float]
) -> None:
    scheme = SCHEMES[name].configure(options)
    assert {role: scheme.gain(role, layer, depth) for role in gains} == pytest.approx(gains)


@pytest.mark.parametrize("power", [0.0, 0.3, 0.5])
def test_deepnorm_power_stays_on_its_curve(power: float) -> None:
    """2N (v² + w²) / alpha² = 1."""
    scheme = SCHEMES["deepnorm_power"].configure({"power": power})
    assert 2 * 50 * 2 * scheme.beta(50) ** 2 / scheme.alpha(50) ** 2 == pytest.approx(1)


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


@pytest.mark.parametrize(
    ("name", "depth", "options", "ending", "value"),
    [(name, *start) for name in SCHEMES for start in PAPERS[name].starts],
)
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
    ("name", "family", "depth", "fan", "distribution"), [*some(ENCODERS, 22), *some(OTHERS, 8)]
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
            elif not SCHEMES[name].constrains:  # which sets the scale: test_ngpt.py
                matrices.add((bank.stack, role))
                n_in, n_out = shapes.get(role, (48, 48))
                variance = 2 / (n_in + n_out) if fan == "in_out" else 1 / n_in
                for layer in (1, depth):
                    wanted = model.schemes[bank.stack].gain(role, layer) * math.sqrt(variance)
                    row = values[layer - 1]
                    # the relative error of a standard deviation of n normal numbers is 1/sqrt(2n)
                    tolerance = 5 / math.sqrt(2 * row.numel())
                    assert row.std().item() == pytest.approx(wanted, rel=tolerance), (role, layer)
                    assert abs(row.mean().item()) <= 5 * wanted / math.sqrt(row.numel())
                    if distribution == "xavier_uniform":
                        assert row.abs().max().item() <= math.sqrt(3) * wanted * 1.000001
    crosses = family == "encoder_decoder"
    expected = {("encoder", "v"), ("decoder", "cross_v")} if crosses else {(family, "v")}
    assert SCHEMES[name].constrains or matrices >= expected


# Schemes whose gradients grow exponentially with depth, beyond the range of fp32 at 1000 layers, or
# whose weights grow as N^3, to 64 GB.
GROWING = ("deep_delta", "mudd")
DEEP = [
    *some([(name, 100) for name in SCHEMES.names()], 12, 1),
    ("deepnorm", 1000),
    *[
        pytest.param(name, 1000, marks=pytest.mark.slow(turn=at))
        for at, name in enumerate(SCHEMES)
        if name not in GROWING
    ],
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
def test_post_scale_gives_the_sum_of_the_scheme(name: str, family: str) -> None:
    schemes = built(name, 3, model__family=family).model.schemes
    x, g = torch.randn(2, 3, D), torch.randn(2, 3, D)
    found = [scheme.post_scale() for scheme in schemes]
    for scheme, a in zip(schemes, found, strict=True):
        if a is not None:
            assert not scheme.changes_by_step
            z = scheme.residual(x, lambda u: g if u is x else None, lambda z: z)
            assert torch.allclose(z, a * x + g, atol=1e-5)
    assert (found[0] is not None) == (PAPERS[name].post is not None)


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
