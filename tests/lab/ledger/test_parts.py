"""The rule that decides a part of a claim, and the null result that no part agrees with."""

import math
from dataclasses import replace
from typing import Any

import pytest
from helpers.claim_parts import FAR, part_of
from scipy import stats

from deepstack.base.errors import PluginError
from deepstack_lab.ledger.claim import Decision, standard_errors
from deepstack_lab.ledger.claims import Finding, Null, Part


def test_a_mean_of_no_draws_is_refused() -> None:
    with pytest.raises(PluginError, match="the part 'x': found no draws; allowed one or more"):
        Part.mean("x", 1.0, [], null=FAR)


@pytest.mark.parametrize(
    ("null", "more"),
    [
        (1.0, {}),
        (1.04, {"tolerance": 0.05}),
        (0.99, {"relation": "<="}),
        (1.04, {"relation": "<=", "tolerance": 0.05}),
        (1.01, {"relation": ">="}),
        (math.nan, {}),
    ],
)
def test_a_part_that_cannot_fail_is_refused(null: float, more: dict[str, Any]) -> None:
    with pytest.raises(PluginError, match=r"'x': its null result .* \(no effect\) .* cannot fail"):
        Part("x", 1.0, 1.0, 0.1, null=Null(null, "no effect"), **more)
    with pytest.raises(TypeError, match="null"):
        Part("x", 1.0, 1.0, 0.1)


@pytest.mark.parametrize("relation", ["<=", ">="])
def test_a_null_result_at_the_bound_never_agrees(relation: Any) -> None:
    for error in (0.0, 1e-9, 0.1, math.inf):
        part = Part("x", 1.0, 1.0, error, relation, null=Null(1.0, "no effect"))
        assert not part.agrees


@pytest.mark.parametrize(
    ("decision", "part"),
    [
        # bounds: the interval lies within, or reaches the bound, or lies beyond
        ("agrees", part_of("x", 1.0, 0.6, 0.1, "<=")),
        ("undecided", part_of("x", 1.0, 0.8, 0.1, "<=")),
        ("undecided", part_of("x", 1.0, 0.9, 0.5, "<=")),
        ("undecided", part_of("x", 1.0, 1.2, 0.1, "<=")),
        ("disagrees", part_of("x", 1.0, 1.4, 0.1, "<=")),
        ("undecided", part_of("x", 1.0, 1.2, 0.1, "<=", 0.25)),
        ("agrees", part_of("x", 1.0, 1.2, 0.01, "<=", 0.25)),
        ("agrees", part_of("x", 1.0, 1.4, 0.1, ">=")),
        ("undecided", part_of("x", 1.0, 0.8, 0.1, ">=")),
        ("disagrees", part_of("x", 1.0, 0.6, 0.1, ">=")),
        # equalities without tolerance: 10 % of the prediction is the widest interval
        ("agrees", part_of("x", 2.0, 2.1, 0.05)),
        ("undecided", part_of("x", 2.0, 2.1, 0.07)),
        ("disagrees", part_of("x", 2.0, 2.1, 0.03)),
        # with tolerance
        ("agrees", part_of("x", 2.0, 2.3, 0.1, "=", 0.2)),
        ("undecided", part_of("x", 2.0, 2.0, 0.2, "=", 0.2)),
        ("undecided", part_of("x", 2.0, 2.5, 0.1, "=", 0.2)),  # the interval reaches the tolerance
        ("disagrees", part_of("x", 2.0, 2.8, 0.1, "=", 0.2)),
        # a prediction of 0: tolerances are absolute
        ("agrees", part_of("x", 0.0, 0.05, 0.03)),
        ("undecided", part_of("x", 0.0, 0.05, 0.04)),
        ("disagrees", part_of("x", 0.0, 0.15, 0.01, "=", 0.1)),
        # the null result lies in the interval, or outside
        ("undecided", part_of("x", 2.0, 2.02, 0.02, null=Null(1.97, "near"))),
        ("agrees", part_of("x", 2.0, 2.02, 0.02, null=Null(1.95, "near"))),
        ("undecided", part_of("x", 2.0, 2.3, 0.1, "=", 0.2, null=Null(2.5, "near"))),
        # exact numbers, and numbers that are none
        ("agrees", part_of("x", 1.0, 1.0, 0.0)),
        ("undecided", part_of("x", 1.0, 1.0, 0.0, "<=", null=Null(1.0, "no effect"))),
        ("disagrees", part_of("x", 1.0, math.nan, 0.1)),
        ("disagrees", part_of("x", 1.0, math.inf, 0.1, "<=")),
        ("undecided", part_of("x", 1.0, 0.5, math.nan, "<=")),
        # few draws widen the interval; two are of C35
        ("disagrees", part_of("x", 1.0, 1.4, 0.1, "<=", draws=1000)),
        ("undecided", part_of("x", 1.0, 1.4, 0.1, "<=", draws=8)),
        ("undecided", part_of("x", 1.0, 0.4, 0.1, "<=", draws=1)),
        ("undecided", Part.mean("one draw has no standard error", 1.0, [1.0], null=FAR)),
        ("undecided", part_of("share of signal, upper", 0.5, 0.317, 0.045, ">=", draws=8)),
        ("disagrees", part_of("share of signal, upper", 0.5, 0.333, 0.030, ">=", draws=16)),
        # many draws, of which as many as are needed decide the part
        ("undecided", part_of("bound", 1.0, 1.2, 0.1, "<=", draws=100)),
        ("undecided", part_of("exact, near", 2.0, 2.01, 0.2, draws=100)),
        ("undecided", part_of("exact, far", 2.0, 2.4, 0.2, draws=100)),
        ("undecided", part_of("wide", 2.0, 2.1, 0.2, tolerance=0.1, draws=100)),
        ("undecided", part_of("beyond the tolerance", 2.0, 2.3, 0.09, tolerance=0.1, draws=100)),
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
    yes, no, open_ = (part_of("x", 1.0, m, e) for m, e in ((1.0, 0.0), (2.0, 0.0), (1.0, 0.5)))
    beside = part_of("x", 1.0, 1.0, 0.5, stated=False)
    bound = part_of("x", 1.0, 0.5, 0.0, "<=")
    for parts, verdict in (
        ([yes, open_], "undecided"),
        ([no, open_], "undecided"),
        ([yes, no, open_], "undecided"),
        ([yes, beside], "agrees"),
        ([bound, beside], "agrees"),
        ([yes, no, beside], "agrees in part"),
        ([no, beside], "disagrees"),
    ):
        assert Finding(parts, "").verdict == verdict


@pytest.mark.parametrize("draws", [2, 8, 60, 1000])
def test_few_draws_are_as_sure_as_many(draws: int) -> None:
    """The share of Student's t beyond equals a normal distribution's beyond three."""
    assert 2 * stats.t.sf(standard_errors(draws), draws - 1) == pytest.approx(2 * stats.norm.sf(3))
