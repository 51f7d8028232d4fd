"""Which setting leads where seeds are missing, against answers that are plain to see."""

import math
from collections.abc import Mapping

import pytest

from deepstack.runs import Best, Cell, Result, loss_of, margin_clause, margin_of


def cell(label: str, losses: Mapping[int, float]) -> Best:
    ends = {
        seed: Result(label, label, 6, 0.1, seed, "done", loss, 3.0) for seed, loss in losses.items()
    }
    return Best(Cell(label, 6, {0.1: ends}, {}), 0.1, "")


def test_a_low_seed_that_the_other_lacks_does_not_lead() -> None:
    lucky = cell("lucky", {0: 2.6, 1: 2.7, 2: 2.65, 3: 1.0})
    better = cell("better", {0: 2.5, 1: 2.6, 2: 2.551})
    margin = margin_of([lucky, better])
    assert margin is not None and margin.leader is better and margin.is_clear
    assert margin.gap.value == pytest.approx((0.1 + 0.1 + 0.099) / 3)


@pytest.mark.parametrize("loss", [2.0, 2.50])
def test_a_setting_without_an_interval_leaves_the_comparison_open(loss: float) -> None:
    first = cell("first", {0: 2.20, 1: 2.21, 2: 2.19})
    second = cell("second", {0: 2.50, 1: 2.52, 2: 2.49})
    margin = margin_of([first, second, cell("rare", {0: loss})])
    assert margin is not None and not margin.is_clear
    assert {margin.leader.label, margin.rival.label} == {"first", "rare"}
    assert "undecided which of" in margin_clause(margin, several_depths=False)


def test_a_setting_without_an_interval_far_behind_the_rival_is_named_and_not_counted() -> None:
    first = cell("first", {0: 2.20, 1: 2.21, 2: 2.19})
    second = cell("second", {0: 2.50, 1: 2.52, 2: 2.49})
    margin = margin_of([cell("rare", {0: 2.9}), first, second])
    assert margin is not None and margin.is_clear and margin.others == 1
    clause = margin_clause(margin, several_depths=False)
    assert clause.startswith("first is better than second: ")
    assert clause.endswith("; not counted, without an interval: rare")
    growing = margin_of([cell("rare", {0: 2.9}), first, second], of_values=True)
    assert growing is not None and not growing.is_clear  # more seeds of it are trained


def test_three_that_beat_each_other_in_turn_are_undecided() -> None:
    a = cell("a", {0: 2.0, 1: 2.4})
    b = cell("b", {1: 2.3, 2: 2.5})
    c = cell("c", {2: 2.4, 0: 2.1, 3: 2.2})
    margin = margin_of([a, b, c])
    assert margin is not None and not margin.is_clear


def test_equal_losses_have_no_interval_whatever_their_digits() -> None:
    assert math.isnan(loss_of([0.1, 0.1, 0.1]).low) and math.isnan(loss_of([2.3] * 7).high)
    assert loss_of([0.1, 0.1, 0.2]).low < 0.1333 < loss_of([0.1, 0.1, 0.2]).high
