"""Every claim: its published numbers, and that a wrong prediction would be noticed."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from helpers.claim_verdicts import PUBLISHED

from deepstack.theory import CLAIMS, Finding
from deepstack.theory import report as reporting
from deepstack.theory.claim import standard_errors
from deepstack.theory.claim_stack import small_stack
from deepstack.theory.norms import fold


@cache
def finding(name: str) -> Finding:
    return CLAIMS[name].measure(0)


def claims(*by_default: str) -> list[Any]:
    """All claims, of which the others are marked slow."""
    slow = pytest.mark.slow
    return [name if name in by_default else pytest.param(name, marks=slow) for name in PUBLISHED]


QUICK = ["C6", "C18", "C22", "C28", "C37"]  # measured twice: draws, and a stack


# of every module of theory/ but training.py, whose claims take five seconds or more
@pytest.mark.parametrize("name", claims("C2", "C5", "C12", "C19", "C25", "C38", "C43", *QUICK))
def test_a_claim_is_measured_and_judged(name: str) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    result = finding(name)
    assert torch.equal(torch.get_rng_state(), before[0]), "it drew from the global generator"
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    verdict, rows = PUBLISHED[name]
    assert result.verdict == verdict
    assert 20 < len(result.note) < 500
    for part, (what, claimed, shown, decision) in zip(result.parts, rows, strict=True):
        words = part.what, reporting.predicted(part)
        assert [*map(reporting.escaped, words)] == [what, claimed]
        assert math.isfinite(part.measured) and math.isfinite(part.uncertainty)
        if part.stated or not part.what.startswith("time"):
            assert reporting.decision_text(part) == decision, what
        if not part.what.startswith("time"):
            number, _, error = shown.partition(" ± ")
            near = pytest.approx(float(number), rel=1e-3, abs=max(1e-6, 4 * float(error or 0)))
            assert part.measured == near, what
        # one without an error is the largest value over all draws, or exact
        exact = part.relation == "<=" or part.tolerance > 0 or part.uncertainty == 0
        assert part.uncertainty > 0 or exact, part.what
        if part.relation == "=" and part.predicted and part.agrees:
            for factor in (1.5, 1 / 1.5, 1 + 3 * part.tolerance + 1e-3 * (not part.tolerance)):
                slack = 2 * standard_errors(part.draws) * part.uncertainty / abs(part.predicted)
                slack = math.copysign(slack, factor - 1)
                moved = replace(part, predicted=part.predicted * (factor + slack))
                assert not moved.agrees, f"{part.what}: {moved}"
    if result.curves:
        for line in result.curves.lines:
            assert len(line.x) == len(line.y) == len(line.error or line.y)


@pytest.mark.parametrize("name", claims(*QUICK))
def test_the_same_seed_gives_the_same_numbers(name: str) -> None:
    for one, other in zip(finding(name).parts, CLAIMS[name].measure(0).parts, strict=True):
        assert one.what.startswith("time") or one == other


@pytest.mark.parametrize("name", ["C18", "C22", "C28"])
def test_another_seed_gives_other_numbers(name: str) -> None:
    pairs = zip(finding(name).parts, CLAIMS[name].measure(1).parts, strict=True)
    assert any(one.measured != other.measured for one, other in pairs)


def test_fold_leaves_no_gain_and_no_bias() -> None:
    stack = small_stack(0, scheme="pre_ln", depth=2)
    with torch.no_grad():
        for scheme in stack.model.schemes:
            for parameter in scheme.parameters():
                parameter += 0.1
        folded, saved = fold(stack.model)
    assert saved == 2 * 2 * 2 * 32
    for scheme in folded.schemes:
        for name, parameter in scheme.named_parameters():
            assert (parameter == (1.0 if name.endswith("gain") else 0.0)).all()
