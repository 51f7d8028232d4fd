"""The feed-forward: every activation, with a gate and without."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.configs import config_with
from helpers.extensions import needs
from helpers.gradients import assert_same_gradients
from helpers.small_runs import small

import deepstack
from benchmarks.peers.peers import shape_of
from benchmarks.peers.products import Products
from deepstack.fast.fuse import fused_sublayer
from deepstack.model import build_model
from deepstack.model.activations import ACTIVATIONS

FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(F, name) for name in ("relu", "gelu", "sigmoid", "tanh", "selu", "silu")},
    "relu2": lambda z: z.clamp(min=0) ** 2,
    "scaled_sigmoid": lambda z: torch.sigmoid(z) / 0.2933790**0.5,
    "scaled_tanh": lambda z: torch.tanh(z) / 0.3942945**0.5,
}

config = partial(
    config_with, {"model.depth": 3, "model.d_model": 12, "model.n_heads": 3, "model.d_ff": 20}
)


@pytest.mark.parametrize("name", ["scaled_sigmoid", "scaled_tanh"])
def test_scaled_activations_keep_the_mean_square(name: str) -> None:
    z = torch.special.ndtri((torch.arange(200_001, dtype=torch.float64)[1:] - 0.5) / 200_000)
    assert ACTIVATIONS[name]()(z).square().mean().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradients_equal_the_formula(name: str, gated: bool, bias: bool) -> None:
    given = config(model__activation=name, model__bias=bias, model__gated=gated)
    module = build_model(given, vocab_size=17).model.layers[0].feed_forward
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.3)
    assert set(dict(module.named_parameters())) == (
        {"w13" if gated else "w1", "w2"}
        | ({"w13_bias" if gated else "w1_bias", "w2_bias"} if bias else set())
    )
    inner, inner_bias = module.matrix(module.first)

    def formula(x: torch.Tensor) -> torch.Tensor:
        hidden = x @ inner.T + (inner_bias if bias else 0)
        gate = hidden[..., 20:] if gated else 1
        hidden = FORMULAS[name](hidden[..., :20]) * gate
        return hidden @ module.w2.T + (module.w2_bias if bias else 0)

    for make in (lambda: module, lambda: fused_sublayer(module)):
        assert_same_gradients(module, formula, make, torch.randn(2, 8, 12), atol=1e-4)


def test_a_separate_gate_matrix_starts_with_the_same_numbers() -> None:
    """And DeepNorm's beta is not for it: torchscale scales fc1 and fc2 of a gated layer alone."""
    together = build_model(config(model__gated=True), vocab_size=17)
    apart = build_model(config(model__gated=True, train__lr_factors={"w3": 0.5}), vocab_size=17)
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(together.model(tokens), apart.model(tokens))
    deep = build_model(config(model__gated=True, model__d_model=96, model__d_ff=384), vocab_size=17)
    w1, w3 = deep.model.layers[1].feed_forward.w13.detach().chunk(2)
    xavier = math.sqrt(2 / (96 + 384))
    assert w1.std().item() == pytest.approx(xavier * (8 * 3) ** -0.25, rel=0.02)
    assert w3.std().item() == pytest.approx(xavier, rel=0.02)


@needs("bound")
def test_the_theorem_does_not_speak_of_a_gate(tmp_path: Path) -> None:
    for gated in (False, True):
        run = deepstack.train(small(model__gated=gated, train__steps=1), out=tmp_path / str(gated))
        for name in ("effective_gain_feed_forward", "grad_norm_predicted"):
            values = run.folder.read_layers(name)[1]
            assert np.isnan(values).all() if gated else np.isfinite(values).all()


def test_the_products_beside_a_gate() -> None:
    plain, gated = (
        Products(shape_of(config(model__gated=gated), 17), 2, torch.device("cpu"), torch.float32)
        for gated in (False, True)
    )
    assert gated.flops() - plain.flops() == 3 * 3 * 2 * (2 * 64) * 12 * 20
