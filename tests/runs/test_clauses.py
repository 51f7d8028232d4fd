"""Counts, words and limits in the clauses that state a result."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.plot_runs import make_run

from deepstack.config import LR
from deepstack.runs import Best, Cell, Result, Runs, margin_clause, margin_of, mean_of
from deepstack.runs.captions import follows_depth, versions_notes
from deepstack.runs.fit import Fit, is_power
from deepstack.runs.spikes import factor_text, moved_clause
from deepstack.runs.update_growth import Growth, Local
from deepstack.runs.words import growth_sentence, lead_sentence, rate_sentence

FIRST = {0: 2.20, 1: 2.21, 2: 2.19}
SECOND = {0: 2.50, 1: 2.52, 2: 2.49}
THIRD = {0: 2.60, 1: 2.62, 2: 2.59}


def cell(label: str, losses: dict[int, float], *others: dict[int, float]) -> Best:
    """The results of a setting at its best rate, 0.1; others: at the rates 0.2, 0.3, …."""
    tried = {
        (i + 1) / 10: {
            seed: Result(label, label, 6, (i + 1) / 10, seed, "done", loss, 3.0)
            for seed, loss in values.items()
        }
        for i, values in enumerate((losses, *others))
    }
    return Best(Cell(label, 6, tried, {}), 0.1, "")


def clause_of(*cells: Best) -> str:
    margin = margin_of(list(cells))
    assert margin is not None
    return margin_clause(margin, several_depths=False)


def test_the_leader_is_better_than_the_others_by_their_number() -> None:
    first, second, third = (cell(*one) for one in zip("abc", (FIRST, SECOND, THIRD), strict=True))
    assert clause_of(first, second).startswith("a is better than b: it ends 0.303 nats below b ")
    assert clause_of(first, second, third).startswith("a is better than b and the other one: it ")
    fourth = cell("d", {seed: loss + 1 for seed, loss in THIRD.items()})
    assert clause_of(first, second, third, fourth).startswith("a is better than b and the 2 others")


@pytest.mark.parametrize(
    ("above", "end"), [(0, "3 pairs of seeds)."), (1, "); a has learned nothing from context.")]
)
def test_a_leader_that_has_learned_nothing_is_said_to(above: float, end: str) -> None:
    first, second = ({seed: one + above for seed, one in ends.items()} for ends in (FIRST, SECOND))
    text = lead_sentence([cell("a", first), cell("b", second)])
    assert text is not None and text.startswith("a is better than b") and text.endswith(end)


def test_settings_with_diverged_runs_are_named_as_not_compared(tmp_path: Path) -> None:
    for scheme, losses in (("deepnorm", FIRST), ("pre_ln", SECOND), ("rezero", THIRD)):
        for seed, loss in losses.items():
            state = "diverged" if (scheme, seed) == ("rezero", 2) else "done"
            make_run(tmp_path, scheme=scheme, seed=seed, masked=loss, state=state)
    text = lead_sentence(Runs.below(tmp_path).bests())
    assert text is not None and text.startswith("DeepNorm is better than Pre-LN: it ends")
    assert text.endswith("pairs of seeds); not compared, with diverged runs: ReZero.")


def test_a_single_seed_as_low_as_the_rival_is_the_rival() -> None:
    rare = cell("rare", {0: sum(SECOND.values()) / 3})
    margin = margin_of([cell("first", FIRST), cell("second", SECOND), rare])
    assert margin is not None and margin.rival.label == "rare" and not margin.uncounted


@pytest.mark.parametrize(
    ("number", "end"), [(1, "r0"), (3, "r0, r1, r2"), (4, "r0, r1, r2 and 1 more")]
)
def test_settings_that_are_not_counted_are_named_up_to_three(number: int, end: str) -> None:
    rare = [cell(f"r{i}", {0: 2.9}) for i in range(number)]
    text = clause_of(cell("first", FIRST), cell("second", SECOND), *rare)
    assert text.endswith(f"; not counted, without an interval: {end}")


def test_a_difference_of_zero_is_not_higher() -> None:
    text = clause_of(cell("a", {0: 2.3, 1: 2.3, 2: 2.4}), cell("b", {0: 2.4, 1: 2.3, 2: 2.3}))
    assert "a ends 0.00 nats lower (" in text


@pytest.mark.parametrize(
    ("step", "column", "words"),
    [
        (1, "model_update", "the first ‖ΔF‖ of A"),
        (1, "model_update_rel", "the first ‖ΔF‖/‖F_0‖ of A"),
        (5, "model_update", "‖ΔF‖ at step 5 of A"),
    ],
)
def test_a_growth_names_its_column_and_step(step: int, column: str, words: str) -> None:
    mean = mean_of([0.5, 0.51, 0.49])
    growth = Growth("A", step, column, (Local(6, 24, mean),), mean, (), False)
    assert words in growth_sentence(growth)


def test_a_setting_with_one_rate_learns_in_so_many_seeds() -> None:
    chosen = cell("A", {0: 2.5, 1: 2.5}, {0: 2.6, 1: 2.6})
    text = rate_sentence([chosen, cell("B", {0: 2.99, 1: 3.0})], most=3)
    assert text is not None and text.startswith("At N = 6, A learns at its best rate (0.1): 2 of 2")
    assert text.endswith("B learns: 0 of 2 seeds.")
    nothing = cell("C", {0: 3.0, 1: 3.0}, {0: 3.1, 1: 3.1})
    assert "C learns at no rate" in (rate_sentence([nothing], most=3) or "")


@pytest.mark.parametrize(("middle", "is_one"), [(0.010, True), (0.015, False)])
def test_means_on_a_line_within_the_seeds_spread_are_a_power(middle: float, is_one: bool) -> None:
    """Three depths leave the line one degree of freedom: 0.015 lies 0.012 off, seeds 0.010."""
    values = [np.exp(bend + np.array([-0.01, 0, 0.01])) for bend in (0, middle, 0)]
    points = pd.DataFrame(
        {"x": [6, 24, 96], "y": [v.mean() for v in values], "mark": "",
         "by_seed": [dict(enumerate(v)) for v in values]}
    )  # fmt: skip
    assert is_power(points, Fit(0.0, 0.01, 0.0, 3, 3)) is is_one


@pytest.mark.parametrize(
    ("median", "start"),
    [
        (10.0, "layer 3 moved first, at step 40: its update is 50.0 times its median"),
        (30.0, "all layers moved at step 40, layer 3 most: its update is 50.0 times"),
        (math.nan, "layer 3 moved first, at step 40"),
    ],
)
def test_one_layer_moves_first_or_all_do(median: float, start: str) -> None:
    row = {"layer": 3.0, "step": 40.0, "factor": 50.0, "factor_median": median}
    assert moved_clause({f"moved_{name}": value for name, value in row.items()}).startswith(start)


@pytest.mark.parametrize(
    ("depths", "text"),
    [
        ((6, 12, 24, 48), "lr 0.048, 0.024, 0.012, 0.006 at N 6, 12, 24, 48"),
        ((6, 12, 24, 48, 96), "lr 0.048 at N 6 to 0.003 at N 96"),
    ],
)
def test_four_rates_by_depth_are_listed_and_five_are_not(
    depths: tuple[int, ...], text: str, tmp_path: Path
) -> None:
    for depth in depths:
        make_run(tmp_path, depth=depth, config={"train.lr": 0.288 / depth})
    assert follows_depth(list(Runs.below(tmp_path)), LR) == text


def test_two_versions_of_a_script_are_named_and_one_is_not() -> None:
    def runs(*digests: str) -> Any:
        return [SimpleNamespace(meta={"trainer": {"files": {"t.py": one}}}) for one in digests]

    assert versions_notes(runs("a", "a")) == []
    (note,) = versions_notes(runs("a", "b", "a"))
    assert note.startswith("the runs had 2 versions of t.py")


@pytest.mark.parametrize(
    ("factor", "text"), [(7.34, "7.3"), (99.96, "100.0"), (123.4, "123"), (46523.0, "46,523")]
)
def test_a_large_factor_has_no_decimals(factor: float, text: str) -> None:
    assert factor_text(factor) == text


@pytest.mark.parametrize(
    ("error", "text"), [(0.03, "0.52 ± 0.03"), (0.003, "0.520 ± 0.003"), (0.006, "0.52 ± 0.01")]
)
def test_an_exponent_has_the_decimals_of_its_error(error: float, text: str) -> None:
    assert str(Fit(0.52, error, 0.0, 4, 3)) == text
