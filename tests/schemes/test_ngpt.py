"""The normalised Transformer: what its equation leaves to the stack, to the step and to options."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.scheme_literals import direction
from helpers.scheme_pieces import D, built, perturbed
from helpers.small_runs import small, weights_of

import deepstack
from deepstack.schemes.ngpt import unit


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("apart", [{}, {"train__lr_factors": {"w3": 0.5}}], ids=str)
def test_a_gate_has_a_separate_scale(bias: bool, apart: dict[str, Any]) -> None:
    """u = s_u (W_3 x), v = s_v (W_1 x) sqrt(d), u SiLU(v)."""
    more = {"model__gated": True, "model__activation": "silu", "model__bias": bias} | apart
    model = perturbed("ngpt", 2, **more)
    x = torch.randn(2, 6, D)
    layer = model.layers[0]
    module, slot = layer.feed_forward, layer.scheme.slots["w1"]
    w1, w3 = (module.w1, module.w3) if apart else module.w13.chunk(2)
    b1, b3 = module.w13_bias.chunk(2) if bias else (0.0, 0.0)
    s_v, s_u = slot.s.chunk(2)
    v, u = (x @ w1.T + b1) * s_v * math.sqrt(D), (x @ w3.T + b3) * s_u
    expected = (u * F.silu(v)) @ module.w2.T + (module.w2_bias if bias else 0.0)
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_vectors_along_the_stream_keep_norm_1(optimizer: str, gated: bool, tmp_path: Path) -> None:
    given = small(
        model__scheme="ngpt", train__optimizer=optimizer, model__gated=gated, train__steps=5,
        train__lr=0.02, train__weight_decay=0.1,
    )  # fmt: skip
    run = deepstack.train(given, out=tmp_path)
    checked = 0
    for state in (deepstack.build_model(given, vocab_size=257).banks.state(), weights_of(run)):
        for key, values in state.items():
            if key.endswith(("qkv", ".o", "w1", "w13", "w2")):
                norms = values.norm(dim=1 if key.endswith((".o", "w2")) else 2)
                torch.testing.assert_close(norms, torch.ones_like(norms), msg=key)
                checked += 1
    assert checked == 8
    assert run.steps["loss"].iloc[-1] < run.steps["loss"].iloc[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch warns of its own functions
@pytest.mark.parametrize("compiling", [False, True])
def test_a_direction_and_its_derivatives(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    z = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(unit(z), direction(z))
    assert torch.autograd.gradcheck(unit, (z,), check_forward_ad=True)
    assert unit(z.detach().bfloat16()).dtype is torch.float32
    # a zero vector has no direction: it stays zero and moves nothing
    z = torch.zeros(2, 4).index_fill(0, torch.tensor(1), 1.0).requires_grad_()
    y = unit(z)
    (y * torch.arange(4.0)).sum().backward()
    assert y[0].eq(0).all() and z.grad is not None and z.grad[0].eq(0).all()
    assert z.grad[1].isfinite().all() and z.grad[1].any()
    assert unit(torch.full((1, 4), math.nan)).isnan().all()
    matrices = torch.randn(2, 3, 4)
    matrices[0, 1] = 0
    type(built("ngpt", 1).model.schemes[0]).project("q", matrices)
    assert matrices[0, 1].eq(0).all() and matrices.isfinite().all()
