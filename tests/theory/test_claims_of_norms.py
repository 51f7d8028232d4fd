"""Claims about norms, starts, attention and gradients: how each falls, and that it could fall."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers.claim_verdicts import EXPECTED
from helpers.sampling import some

from deepstack.theory import CLAIMS, Finding
from deepstack.theory.claim import sure
from deepstack.theory.claim_stack import SumTap, started, tapped
from deepstack.theory.draws import agreement, slope
from deepstack.theory.gradients import signals
from deepstack.theory.norms import fold, stream_powers, unit_branches
from deepstack.training import mean_loss

TIMED = ("time",)  # how the name of a part begins that is another at every execution


@cache
def finding(name: str) -> Finding:
    return CLAIMS[name].measure(0)


@pytest.mark.parametrize("name", some(EXPECTED, 4))
def test_a_claim_falls_as_it_did_and_a_wrong_prediction_is_seen(name: str) -> None:
    before = torch.get_rng_state()
    found = finding(name)
    assert torch.equal(torch.get_rng_state(), before), "it drew from the global generator"

    verdict, disagreeing = EXPECTED[name]
    assert found.verdict == verdict
    wrong = [part.what for part in found.parts if part.stated and not part.agrees]
    assert len(wrong) == len(disagreeing)
    assert all(what.startswith(begin) for what, begin in zip(wrong, disagreeing, strict=True))

    for part in found.parts:
        assert math.isfinite(part.measured) and math.isfinite(part.uncertainty)
        if part.relation == "=" and part.predicted and part.agrees:
            for factor in (1.5, 1 + 3 * part.tolerance + 1e-3 * (not part.tolerance)):
                slack = 2 * sure(part.draws) * part.uncertainty / abs(part.predicted)
                moved = replace(part, predicted=part.predicted * (factor + slack))
                assert not moved.agrees, f"{part.what}: {moved}"


@pytest.mark.parametrize("name", some(EXPECTED, 4))
def test_the_same_seed_gives_the_same_numbers(name: str) -> None:
    first, second = finding(name), CLAIMS[name].measure(0)
    for one, other in zip(first.parts, second.parts, strict=True):
        if not one.what.startswith(TIMED):
            assert one == other


@pytest.mark.parametrize("name", ["C18", "C19", "C20", "C22", "C28"])
def test_another_seed_gives_others(name: str) -> None:
    pairs = zip(finding(name).parts, CLAIMS[name].measure(1).parts, strict=True)
    assert any(one.measured != other.measured for one, other in pairs)


def test_what_the_documents_do_not_say_is_shown_beside() -> None:
    shown = {part.what: part for name in ("C18", "C25", "C29") for part in finding(name).parts}
    # a square matrix is as far from orthogonal as I is from 0, at any size
    assert shown["‖WᵀW − I‖_F/‖I‖_F, √(1 + 1/m)"].agrees
    assert shown["‖WᵀW − I‖₂, (1 + 1)² − 1"].agrees
    # eigenvalues give the norm of a symmetric matrix
    assert shown["the same, symmetric"].agrees
    # and the right Jacobian of LN is the one with both signs negative
    assert shown["the same, I − (11ᵀ + r̄r̄ᵀ)/d"].agrees


def test_slope_and_agreement() -> None:
    assert slope([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]) == pytest.approx(2.0)
    x = torch.tensor([3.0, 4.0])
    assert agreement(x, x) == 1.0
    assert agreement(2 * x, x) == pytest.approx(0.0)


def test_error_signals_are_the_gradients_of_the_loss() -> None:
    stack = started(0, {"model.depth": 2})
    found = signals(stack)
    assert found.names == ["attention", "feed_forward"] * 2
    inputs, targets = stack.batch(1)
    model = stack.built.model
    x = model.start(inputs).detach().requires_grad_()
    scheme, layer = model.layers[0].scheme, model.layers[0]
    r = x + layer.attention(x)
    o = scheme.attention_norms[0](r)
    end = layer.scheme.residual(o, layer.feed_forward, scheme.feed_forward_norms[0])
    value = mean_loss(model.head(model.layers[1](end), model.embedding), targets)
    z, middle, out = (g.norm() for g in torch.autograd.grad(value, (x, r, o)))
    assert found.values["β_LN"][0].item() == pytest.approx((middle / out).item(), rel=1e-4)
    assert found.values["β_RC"][0].item() == pytest.approx((z / middle).item(), rel=1e-4)
    assert "residual" not in vars(scheme)  # nothing watches any more


def test_unit_branches_have_unit_mean_square() -> None:
    stack = started(0, {"model.scheme": "pre_ln", "model.depth": 3})
    unit_branches(stack)
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    model = stack.built.model
    with torch.no_grad(), tapped(model.schemes, SumTap(rows)):
        model(stack.batch(1)[0])
    for i, layer in enumerate(model.layers):
        for j, G in enumerate((layer.attention, layer.feed_forward)):
            with torch.no_grad():
                y = G(rows[2 * i + j][2])
            assert y.square().mean().item() == pytest.approx(1.0, rel=1e-4)
    assert len(stream_powers(stack)[0]) == 6


def test_fold_leaves_no_gain_and_no_bias() -> None:
    stack = started(0, {"model.scheme": "pre_ln", "model.depth": 2})
    with torch.no_grad():
        for scheme in stack.built.model.schemes:
            for parameter in scheme.parameters():
                parameter += 0.1
        folded, saved = fold(stack.built.model)
    assert saved == 2 * 2 * 2 * 32
    for scheme in folded.schemes:
        for name, parameter in scheme.named_parameters():
            assert (parameter == (1.0 if name.endswith("gain") else 0.0)).all()
