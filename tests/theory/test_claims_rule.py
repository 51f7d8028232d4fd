"""The rule that decides parts and claims, the draws that undecided parts need, and `--thorough`."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.command_line import typed
from scipy import stats

from deepstack.theory import Finding, Part, claim, repeats
from deepstack.theory.claim import Decision, Relation, standard_errors
from deepstack.theory.sources import LAYER_CAKE


@pytest.mark.parametrize(
    ("relation", "predicted", "measured", "error", "tolerance", "decision"),
    [
        # bounds: the estimate satisfies the claim, or its interval reaches it, or neither
        ("<=", 1.0, 0.9, 0.5, 0.0, "agrees"),
        ("<=", 1.0, 1.2, 0.1, 0.0, "undecided"),
        ("<=", 1.0, 1.4, 0.1, 0.0, "disagrees"),
        ("<=", 1.0, 1.2, 0.1, 0.25, "agrees"),
        (">=", 1.0, 0.8, 0.1, 0.0, "undecided"),
        (">=", 1.0, 0.6, 0.1, 0.0, "disagrees"),
        # equalities without tolerance: 10 % of the prediction is the widest interval
        ("=", 2.0, 2.1, 0.05, 0.0, "agrees"),
        ("=", 2.0, 2.1, 0.07, 0.0, "undecided"),
        ("=", 2.0, 2.1, 0.03, 0.0, "disagrees"),
        # with tolerance
        ("=", 2.0, 2.3, 0.1, 0.2, "agrees"),
        ("=", 2.0, 2.0, 0.2, 0.2, "undecided"),
        ("=", 2.0, 2.5, 0.1, 0.2, "undecided"),  # the interval reaches the tolerance
        ("=", 2.0, 2.8, 0.1, 0.2, "disagrees"),
        # a prediction of 0: tolerances are absolute
        ("=", 0.0, 0.05, 0.03, 0.0, "agrees"),
        ("=", 0.0, 0.05, 0.04, 0.0, "undecided"),
        ("=", 0.0, 0.15, 0.01, 0.1, "disagrees"),
        # exact numbers, and numbers that are none
        ("=", 1.0, 1.0, 0.0, 0.0, "agrees"),
        ("=", 1.0, math.nan, 0.1, 0.0, "disagrees"),
        ("<=", 1.0, math.inf, 0.1, 0.0, "disagrees"),
        ("<=", 1.0, 0.5, math.nan, 0.0, "undecided"),
    ],
)
def test_estimate_and_interval_decide_a_part(
    relation: Relation, predicted: float, measured: float, error: float, tolerance: float,
    decision: Decision,
) -> None:  # fmt: skip
    part = Part("x", predicted, measured, error, relation, tolerance)
    assert part.decision == decision
    assert part.agrees is (decision == "agrees")


def test_few_draws_widen_the_interval() -> None:
    assert Part("x", 1.0, 1.4, 0.1, "<=", draws=1000).decision == "disagrees"
    assert Part("x", 1.0, 1.4, 0.1, "<=", draws=8).decision == "undecided"
    assert Part("x", 1.0, 0.4, 0.1, "<=", draws=1).decision == "undecided"
    assert Part.mean("one draw has no standard error", 1.0, [1.0]).decision == "undecided"


def test_a_bound_far_from_its_estimate_does_not_agree_through_a_large_error() -> None:
    """Two parts of C35: the share of signal in the upper layers, claimed to be at least 0.5."""
    few = Part("share of signal, upper", 0.5, 0.317, 0.045, ">=", draws=8)
    assert (few.decision, few.draws_needed) == ("undecided", 10)
    assert Part("the same", 0.5, 0.333, 0.030, ">=", draws=16).decision == "disagrees"


@pytest.mark.parametrize(
    "part",
    [
        Part("bound", 1.0, 1.2, 0.1, "<=", draws=100),
        Part("exact, near", 2.0, 2.01, 0.2, draws=100),
        Part("exact, far", 2.0, 2.4, 0.2, draws=100),
        Part("wide", 2.0, 2.1, 0.2, tolerance=0.1, draws=100),
        Part("beyond the tolerance", 2.0, 2.3, 0.09, tolerance=0.1, draws=100),
    ],
)
def test_as_many_draws_as_are_needed_decide_a_part(part: Part) -> None:
    assert part.decision == "undecided" and part.draws_needed
    for count, decided in ((part.draws_needed + 1, True), (part.draws_needed * 9 // 10, False)):
        error = part.uncertainty * math.sqrt(part.draws / count)
        more = replace(part, uncertainty=error, draws=count)
        assert (more.decision != "undecided") is decided


def test_only_undecided_parts_need_draws() -> None:
    assert Part("x", 1.0, 1.0, 0.01, draws=100).draws_needed is None
    assert Part("x", 1.0, 1.2, 0.1, "<=").draws_needed is None  # no number of draws to scale
    assert Part.mean("x", 1.0, [1.0]).draws_needed is None


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


@pytest.fixture
def noisy() -> None:
    @claim("C0", LAYER_CAKE)
    def experiment(seed: int) -> Finding:
        """E[x] = 1."""
        draws = 1 + np.tile([-0.5, 0.5], repeats(20))
        parts = [
            Part.mean("mean", 1.0, draws),
            Part.mean("wider", 1.0, 4 * draws - 3, stated=False),
        ]
        return Finding(parts, f"{len(draws)} draws.")


def measured(*more: str) -> dict[str, Any]:
    (claimed,) = json.loads(typed("theory", "--claim", "C0", "--json", *more).stdout)
    return claimed


def test_thorough_draws_eight_times_as_many_and_decides(noisy: None) -> None:
    plain, thorough = measured(), measured("--thorough")
    assert (plain["verdict"], thorough["verdict"]) == ("undecided", "holds")
    part, decided = plain["parts"][0], thorough["parts"][0]
    assert (part["draws"], decided["draws"]) == (40, 320)
    assert (part["agrees"], part["decision"]) == (False, "undecided")
    assert part["draws"] < part["draws_needed"] <= decided["draws"]
    assert (decided["agrees"], decided["decision"]) == (True, "agrees")
    assert decided["draws_needed"] is None
    assert measured() == plain  # the option of one call is not kept for the next


def test_table_and_page_list_undecided_parts_with_the_draws_they_need(
    noisy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    first, second = (part["draws_needed"] for part in measured()["parts"])
    table = typed("theory", "--claim", "C0").stdout
    assert f"undecided (needs {first} draws, has 40)" in table
    page = typed("theory", "--claim", "C0", "--markdown").stdout
    assert f"| C0 | mean | 40 | {first} |" in page
    assert f"| C0 | beside: wider | 40 | {second} |" in page
    page = typed("theory", "--claim", "C22", "--markdown").stdout
    assert "No part is undecided." in page


@pytest.mark.parametrize("draws", [2, 8, 60, 1000])
def test_few_draws_are_as_sure_as_many(draws: int) -> None:
    """The share of Student's t beyond is that of a normal distribution beyond three."""
    assert 2 * stats.t.sf(standard_errors(draws), draws - 1) == pytest.approx(2 * stats.norm.sf(3))
