"""Claims: the rule that decides them, and every claim's published numbers.

A wrong prediction would be noticed.
"""

import json
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.claim_verdicts import PUBLISHED
from helpers.command_line import typed
from scipy import stats

from deepstack.errors import PluginError
from deepstack.theory import CLAIMS, Finding, Part, claim, repeats
from deepstack.theory import report as reporting
from deepstack.theory.claim import Decision, standard_errors
from deepstack.theory.claim_stack import small_stack
from deepstack.theory.norms import fold
from deepstack.theory.sources import LAYER_CAKE


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


# -- the rule -------------------------------------------------------------------------------------


def test_a_mean_of_no_draws_is_refused() -> None:
    with pytest.raises(PluginError, match="the part 'x': found no draws; allowed one or more"):
        Part.mean("x", 1.0, [])


@pytest.mark.parametrize(
    ("decision", "part"),
    [
        # bounds: the estimate satisfies the claim, or its interval reaches it, or neither
        ("agrees", Part("x", 1.0, 0.9, 0.5, "<=")),
        ("undecided", Part("x", 1.0, 1.2, 0.1, "<=")),
        ("disagrees", Part("x", 1.0, 1.4, 0.1, "<=")),
        ("agrees", Part("x", 1.0, 1.2, 0.1, "<=", 0.25)),
        ("undecided", Part("x", 1.0, 0.8, 0.1, ">=")),
        ("disagrees", Part("x", 1.0, 0.6, 0.1, ">=")),
        # equalities without tolerance: 10 % of the prediction is the widest interval
        ("agrees", Part("x", 2.0, 2.1, 0.05)),
        ("undecided", Part("x", 2.0, 2.1, 0.07)),
        ("disagrees", Part("x", 2.0, 2.1, 0.03)),
        # with tolerance
        ("agrees", Part("x", 2.0, 2.3, 0.1, "=", 0.2)),
        ("undecided", Part("x", 2.0, 2.0, 0.2, "=", 0.2)),
        ("undecided", Part("x", 2.0, 2.5, 0.1, "=", 0.2)),  # the interval reaches the tolerance
        ("disagrees", Part("x", 2.0, 2.8, 0.1, "=", 0.2)),
        # a prediction of 0: tolerances are absolute
        ("agrees", Part("x", 0.0, 0.05, 0.03)),
        ("undecided", Part("x", 0.0, 0.05, 0.04)),
        ("disagrees", Part("x", 0.0, 0.15, 0.01, "=", 0.1)),
        # exact numbers, and numbers that are none
        ("agrees", Part("x", 1.0, 1.0, 0.0)),
        ("disagrees", Part("x", 1.0, math.nan, 0.1)),
        ("disagrees", Part("x", 1.0, math.inf, 0.1, "<=")),
        ("undecided", Part("x", 1.0, 0.5, math.nan, "<=")),
        # few draws widen the interval; two are of C35
        ("disagrees", Part("x", 1.0, 1.4, 0.1, "<=", draws=1000)),
        ("undecided", Part("x", 1.0, 1.4, 0.1, "<=", draws=8)),
        ("undecided", Part("x", 1.0, 0.4, 0.1, "<=", draws=1)),
        ("undecided", Part.mean("one draw has no standard error", 1.0, [1.0])),
        ("undecided", Part("share of signal, upper", 0.5, 0.317, 0.045, ">=", draws=8)),
        ("disagrees", Part("share of signal, upper", 0.5, 0.333, 0.030, ">=", draws=16)),
        # many draws, of which as many as are needed decide the part
        ("undecided", Part("bound", 1.0, 1.2, 0.1, "<=", draws=100)),
        ("undecided", Part("exact, near", 2.0, 2.01, 0.2, draws=100)),
        ("undecided", Part("exact, far", 2.0, 2.4, 0.2, draws=100)),
        ("undecided", Part("wide", 2.0, 2.1, 0.2, tolerance=0.1, draws=100)),
        ("undecided", Part("beyond the tolerance", 2.0, 2.3, 0.09, tolerance=0.1, draws=100)),
    ],
)
def test_estimate_and_interval_decide_a_part(decision: Decision, part: Part) -> None:
    assert part.decision == decision
    assert part.agrees is (decision == "agrees")
    assert bool(part.draws_needed) is (decision == "undecided" and part.draws > 1)
    if part.draws == 100:
        for count, decided in ((part.draws_needed + 1, True), (part.draws_needed * 9 // 10, False)):
            error = part.uncertainty * math.sqrt(part.draws / count)
            more = replace(part, uncertainty=error, draws=count)
            assert (more.decision != "undecided") is decided


def test_an_undecided_stated_part_leaves_the_claim_undecided() -> None:
    yes, no, open_ = (Part("x", 1.0, m, e) for m, e in ((1.0, 0.0), (2.0, 0.0), (1.0, 0.5)))
    beside = Part("x", 1.0, 1.0, 0.5, stated=False)
    bound = Part("x", 1.0, 0.5, 0.0, "<=")
    for parts, verdict in (
        ([yes, open_], "undecided"),
        ([no, open_], "undecided"),
        ([yes, no, open_], "undecided"),
        ([yes, beside], "holds"),
        ([bound, beside], "holds as a bound"),
        ([yes, no, beside], "holds in part"),
        ([no, beside], "does not hold"),
    ):
        assert Finding(parts, "").verdict == verdict


def measured(*more: str) -> dict[str, Any]:
    (claimed,) = json.loads(typed("theory", "--claim", "C0", "--json", *more).stdout)
    return claimed


def test_thorough_draws_eight_times_as_many_and_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    @claim("C0", LAYER_CAKE)
    def experiment(seed: int) -> Finding:
        """E[x] = 1."""
        draws = 1 + np.tile([-0.5, 0.5], repeats(20))
        beside = Part.mean("wider", 1.0, 4 * draws - 3, stated=False)
        return Finding([Part.mean("mean", 1.0, draws), beside], f"{len(draws)} draws.")

    plain, thorough = measured(), measured("--thorough")
    assert measured() == plain  # the option of one call is not kept for the next
    assert (plain["verdict"], thorough["verdict"]) == ("undecided", "holds")
    part, decided = plain["parts"][0], thorough["parts"][0]
    assert (part["draws"], part["decision"]) == (40, "undecided")
    assert 40 < part["draws_needed"] <= 320
    assert (decided["draws"], decided["decision"]) == (320, "agrees")
    monkeypatch.setenv("COLUMNS", "200")
    first, second = (part["draws_needed"] for part in plain["parts"])
    assert f"undecided (needs {first} draws, has 40)" in typed("theory", "--claim", "C0").stdout
    page = typed("theory", "--claim", "C0", "--markdown").stdout
    assert f"| C0 | mean | 40 | {first} |\n| C0 | beside: wider | 40 | {second} |" in page


@pytest.mark.parametrize("draws", [2, 8, 60, 1000])
def test_few_draws_are_as_sure_as_many(draws: int) -> None:
    """The share of Student's t beyond is that of a normal distribution beyond three."""
    assert 2 * stats.t.sf(standard_errors(draws), draws - 1) == pytest.approx(2 * stats.norm.sf(3))
