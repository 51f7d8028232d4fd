"""Every claim: its verdict, and that a wrong prediction would be noticed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers.claim_verdicts import PUBLISHED
from helpers.sampling import some

from deepstack.theory import CLAIMS, Finding
from deepstack.theory.claim import sure
from deepstack.theory.claim_stack import Trial, started
from deepstack.theory.norms import fold, stream_powers, unit_branches
from deepstack.theory.report import escaped
from deepstack.theory.statistics import agreement, exponents, slopes

LONG = (
    "C8", "C9", "C11", "C13", "C15", "C16", "C24", "C27", "C29", "C31", "C34", "C35", "C39", "C40",
    "C41", "C42", "C44", "C45", "C46", "C47",
)  # fmt: skip
Measured = dict[str, float]


@cache
def finding(name: str) -> Finding:
    return CLAIMS[name].measure(0)


@pytest.mark.parametrize("name", some(PUBLISHED, 3))
def test_a_claim_is_measured_and_judged(name: str) -> None:
    before = torch.get_rng_state()
    result = finding(name)
    assert torch.equal(torch.get_rng_state(), before), "it drew from the global generator"
    wrong = [escaped(part.what) for part in result.parts if part.stated and not part.agrees]
    assert (result.verdict, wrong) == PUBLISHED[name]
    assert 20 < len(result.note) < 500
    for part in result.parts:
        assert math.isfinite(part.measured) and math.isfinite(part.uncertainty)
        # one without an error is the largest value over all draws, or exact
        exact = part.relation == "<=" or part.tolerance > 0 or part.uncertainty == 0
        assert part.uncertainty > 0 or exact, part.what
        if part.relation == "=" and part.predicted and part.agrees:
            for factor in (1.5, 1 / 1.5, 1 + 3 * part.tolerance + 1e-3 * (not part.tolerance)):
                slack = 2 * sure(part.draws) * part.uncertainty / abs(part.predicted)
                slack = math.copysign(slack, factor - 1)
                moved = replace(part, predicted=part.predicted * (factor + slack))
                assert not moved.agrees, f"{part.what}: {moved}"
    if result.curves:
        for line in result.curves.lines:
            assert len(line.x) == len(line.y) == len(line.error or line.y)
    if name in ALSO:
        ALSO[name]({part.what: part.measured for part in result.parts})
    if name not in LONG:
        assert_repeatable(name)


def assert_repeatable(name: str) -> None:
    for one, other in zip(finding(name).parts, CLAIMS[name].measure(0).parts, strict=True):
        assert one.what.startswith("time") or one == other


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_the_same_seed_gives_the_same_numbers_of_long_claims(name: str) -> None:
    assert_repeatable(name)


@pytest.mark.parametrize("name", ["C4", "C18", "C19", "C20", "C22", "C28"])
def test_another_seed_gives_other_numbers(name: str) -> None:
    pairs = zip(finding(name).parts, CLAIMS[name].measure(1).parts, strict=True)
    assert any(one.measured != other.measured for one, other in pairs)


def flat_weights_average(measured: Measured) -> None:
    assert measured["exponent of ‖softmax(q)X‖ in n, spread 0.0"] == pytest.approx(-0.5, abs=0.02)


def one_tokens_gradient_step_is_longer_by_the_root_of_m(measured: Measured) -> None:
    assert measured["‖∂z/∂V ΔV‖/(w‖ΔV‖), a gradient step on 1 token"] == pytest.approx(16, rel=0.05)
    assert measured["the same, a gradient step on 1 token"] > 100


def a_random_step_keeps_the_bound_and_training_does_not(measured: Measured) -> None:
    for what, ratio in measured.items():
        assert (ratio > 5) if "random" in what else (ratio < 1), what


def gradients_do_not_decay_as_the_formula(measured: Measured) -> None:
    for label in ("Post-LN, Xavier", "DeepNorm (tight)"):
        assert 0.7 < measured[f"‖∂F/∂θ‖ of layer 1 over layer N, {label}"] < 1.5


def matrices_and_tables_alone_are_flat(measured: Measured) -> None:
    grows = {what.split(":")[0]: ratio for what, ratio in measured.items()}
    assert grows["matrices"] == pytest.approx(1, abs=0.1)
    assert grows["norm gains"] == pytest.approx(9, rel=0.1)  # as N, from 6 to 54 layers
    assert grows["linear biases"] == pytest.approx(3, rel=0.2)  # as the root of N
    assert grows["Post-LN's matrices"] > 1  # a logarithm


def run_time_beta_is_squared_in_logits_and_missing_in_branches(measured: Measured) -> None:
    beta = (8 * 36) ** -0.25
    assert measured["root mean square of q kᵀ"] == pytest.approx(beta**2, rel=1e-5)
    branch = measured["‖branch‖ of the feed-forward at the start"]
    assert branch == pytest.approx(1 / beta, rel=1e-4)


ALSO = {
    "C3": flat_weights_average,
    "C7": one_tokens_gradient_step_is_longer_by_the_root_of_m,
    "C8": a_random_step_keeps_the_bound_and_training_does_not,
    "C9": gradients_do_not_decay_as_the_formula,
    "C11": matrices_and_tables_alone_are_flat,
    "C15": run_time_beta_is_squared_in_logits_and_missing_in_branches,
}


def test_true_statements_stand_beside_wrong_claims() -> None:
    shown = {part.what: part for name in ("C18", "C25", "C29") for part in finding(name).parts}
    for what in (
        # a square matrix is as far from orthogonal as I is from 0, at any size
        "‖WᵀW − I‖_F/‖I‖_F, √(1 + 1/m)", "‖WᵀW − I‖₂, (1 + 1)² − 1",
        "the same, symmetric",  # eigenvalues give the norm of a symmetric matrix
        "the same, I − (11ᵀ + r̄r̄ᵀ)/d",  # the right Jacobian of LN has both signs negative
    ):  # fmt: skip
        assert shown[what].agrees


def test_slopes_exponents_and_agreement() -> None:
    assert slopes([0.0, 1.0, 2.0], torch.tensor([[1.0, 3.0, 5.0]])).tolist() == pytest.approx([2.0])
    x = [2.0, 4.0, 16.0]
    y = torch.tensor([[3 * v**-0.5 for v in x], [v**2 for v in x]])
    assert exponents(x, y).tolist() == pytest.approx([-0.5, 2.0])
    a = torch.tensor([3.0, 4.0])
    assert agreement(a, a) == 1.0
    assert agreement(2 * a, a) == pytest.approx(0.0)


def test_a_trials_step_is_undone() -> None:
    trial = Trial(0, {"model.depth": 2})
    trial.backward()
    before = trial.values()
    moved = trial.update_of(0.1, trial.banks_of("w1"))
    assert moved > 0
    assert all(map(torch.equal, before, trial.values()))
    assert trial.update_of(0.1, trial.banks_of("w1")) == moved


def test_unit_branches_have_unit_mean_square() -> None:
    stack = started(0, {"model.scheme": "pre_ln", "model.depth": 3})
    unit_branches(stack)
    (snapshot,) = stack.snapshots()
    powers = snapshot.branch.square().mean(dim=-1) / 32
    assert powers.flatten().tolist() == pytest.approx([1.0] * 6, rel=1e-4)
    assert all(values.shape == (6,) for n, values in stream_powers(stack).items() if n != "x_0")


def test_fold_leaves_no_gain_and_no_bias() -> None:
    stack = started(0, {"model.scheme": "pre_ln", "model.depth": 2})
    with torch.no_grad():
        for scheme in stack.model.schemes:
            for parameter in scheme.parameters():
                parameter += 0.1
        folded, saved = fold(stack.model)
    assert saved == 2 * 2 * 2 * 32
    for scheme in folded.schemes:
        for name, parameter in scheme.named_parameters():
            assert (parameter == (1.0 if name.endswith("gain") else 0.0)).all()
