"""Every claim: its published numbers, and that a wrong prediction would be noticed."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.claim_verdicts import PUBLISHED

from deepstack.theory import CLAIMS
from deepstack.theory import report as reporting
from deepstack.theory.claim import standard_errors
from deepstack.theory.claim_stack import small_stack
from deepstack.theory.norms import fold


def claims(*by_default: str) -> list[Any]:
    """All claims, of which the others are marked slow."""
    slow = pytest.mark.slow
    return [name if name in by_default else pytest.param(name, marks=slow) for name in PUBLISHED]


ONCE = ["C2", "C5", "C12", "C19", "C25", "C38", "C43"]  # all others are measured twice


# of every module of theory/ but training.py, whose claims take five seconds or more
@pytest.mark.parametrize("name", claims(*ONCE, "C6", "C18", "C22", "C28", "C37"))
def test_a_claim_is_measured_and_judged(name: str) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    result = CLAIMS[name].measure(0)
    assert torch.equal(torch.get_rng_state(), before[0]), "it drew from the global generator"
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    verdict, rows = PUBLISHED[name]
    assert result.verdict == verdict
    assert 20 < len(result.note) < 500
    for part, (what, claimed, shown, decision) in zip(result.parts, rows, strict=True):
        assert reporting.escaped(part.what) == what
        assert reporting.escaped(reporting.predicted(part)) == claimed
        assert math.isfinite(part.measured) and math.isfinite(part.uncertainty)
        if part.stated or not part.what.startswith("time"):
            assert reporting.decision_text(part) == decision, what
        if not part.what.startswith("time"):
            number, _, error = shown.partition(" ± ")
            near = pytest.approx(float(number), rel=1e-3, abs=max(1e-6, 4 * float(error or 0)))
            assert part.measured == near, what
        if part.relation == "=" and part.predicted and part.agrees:
            for factor in (1.5, 1 / 1.5, 1 + 3 * part.tolerance + 1e-3 * (not part.tolerance)):
                slack = 2 * standard_errors(part.draws) * part.uncertainty / abs(part.predicted)
                slack = math.copysign(slack, factor - 1)
                moved = replace(part, predicted=part.predicted * (factor + slack))
                assert not moved.agrees, f"{part.what}: {moved}"
    for line in result.curves.lines if result.curves else ():
        assert len(line.x) == len(line.y) == len(line.error or line.y)
    if name not in ONCE:
        for one, other in zip(result.parts, CLAIMS[name].measure(0).parts, strict=True):
            assert one.what.startswith("time") or one == other


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
