"""Laws of losses over depth, width and compute, with their intervals."""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import refusal, typed
from helpers.plot_runs import make_run

from deepstack.base.errors import NothingMatchedError
from deepstack.plots import Options
from deepstack.runs import Runs
from deepstack.tools.laws.chart import draw_law
from deepstack.tools.laws.laws import budgets_of, fit_law, law_table

DEPTHS = [2, 4, 8, 16, 32, 64]
E, C, A = 1.7, 2.0, 0.6


def noisy_losses(seed: int, *, noise: float = 0.01, seeds: int = 6) -> list[dict[int, float]]:
    random = np.random.default_rng(seed)
    return [{s: E + C * x**-A + noise * random.normal() for s in range(seeds)} for x in DEPTHS]


def test_a_law_without_noise_is_found_exactly() -> None:
    law = fit_law([1e11 * x for x in DEPTHS], noisy_losses(0, noise=1e-9), draws=5)
    assert (law.E.value, law.a.value) == pytest.approx((E, A), rel=1e-6)
    assert law.c.value == pytest.approx(C * 1e11**A, rel=1e-5)
    assert law.residual < 1e-8 and (law.n, law.seeds) == (6, 6)


def test_the_residual_of_a_law_is_the_root_of_a_mean() -> None:
    losses = noisy_losses(0, noise=0.05)
    law = fit_law(DEPTHS, losses, draws=5)
    squares = [
        (sum(here.values()) / 6 - law.E.value - law.c.value / x**law.a.value) ** 2
        for x, here in zip(DEPTHS, losses, strict=True)
    ]
    assert law.residual == pytest.approx(math.sqrt(sum(squares) / 6), rel=1e-9) and sum(squares)


def test_a_law_of_fewer_than_three_seeds_has_no_interval() -> None:
    for seeds in (1, 2):
        law = fit_law(DEPTHS, noisy_losses(3, seeds=seeds), draws=60)
        assert law.seeds == seeds and 0.4 < law.a.value < 0.8
        ends = [*law.E[1:], *law.c[1:], *law.a[1:], *np.ravel(law.curve(np.array([8.0]))[1:])]
        assert np.isnan(ends).all() and law.a.text(2) == f"{law.a.value:.2f}"
    law = fit_law(DEPTHS, noisy_losses(3, seeds=3), draws=60)
    assert 0 < law.a.low < law.a.value < law.a.high


def test_losses_without_a_floor_have_none() -> None:
    values = [{s: 3 * x**-0.3 * (1 + 1e-3 * s) for s in range(3)} for x in DEPTHS]
    law = fit_law(DEPTHS, values, draws=20)
    assert law.E.value == 0 and law.a.value == pytest.approx(0.3, abs=1e-4)
    assert np.isnan(law.E[1:]).all(), "0 to 0 would exclude every floor"


def test_the_seed_that_all_depths_share_makes_the_law() -> None:
    """Seeds differ in level: means of other seeds at the last depth would bend the curve."""
    level = {0: 0.0, 1: 0.05, 2: -0.02}
    losses = [{s: 2 + x**-0.5 + level[s] for s in level} for x in DEPTHS[:-1]]
    for seed in level:
        last = {seed: 2 + DEPTHS[-1] ** -0.5 + level[seed]}
        law = fit_law(DEPTHS, [*losses, last], draws=5)
        assert law.a.value == pytest.approx(0.5, abs=1e-5) and law.seeds == 1


def test_depths_left_out_and_seeds_that_none_shares_are_named(tmp_path: Path) -> None:
    for depth, seed in product((2, 4, 8, 16, 32, 64), (0, 1, 2)):
        if (depth, seed) not in ((2, 0), (4, 1), (8, 2)):
            make_run(
                tmp_path, depth=depth, seed=seed, masked=1.5 + 1 / depth,
                state="diverged" if depth == 32 else "done",
            )  # fmt: skip
    rows, notes = law_table(Runs.below(tmp_path), "depth")
    assert [row["n"] for row in rows] == [5]
    assert any("3 diverged runs at N = 32 left out" in note for note in notes), notes
    assert any("no seed is at every point" in note for note in notes), notes


def test_a_seed_that_some_depth_lacks_is_named_and_not_drawn(tmp_path: Path) -> None:
    for depth, seed in product((2, 4, 8, 16, 32), (0, 1, 2, 3)):
        lost = (depth, seed) == (8, 1)
        masked = 1.5 + 1 / depth + 0.3 * (seed == 1)
        state = "diverged" if lost else "done"
        make_run(tmp_path, depth=depth, seed=seed, masked=masked, state=state)
    runs = Runs.below(tmp_path)
    rows, notes = law_table(runs, "depth")
    assert rows[0]["seeds"] == 3 and rows[0]["E"] == pytest.approx(1.5, abs=1e-3)
    assert "DeepNorm: some point lacks seed 1; the law is of the other seeds" in notes
    drawn = draw_law(runs, "depth", options=Options()).data
    points = drawn[drawn["kind"] == "point"]
    assert set(points["n"]) == {3} and points["y"].min() == pytest.approx(1.5 + 1 / 32)


def test_runs_without_a_width_have_no_law_of_width(tmp_path: Path) -> None:
    for depth in DEPTHS:
        make_run(tmp_path, depth=depth, masked=1.5 + 1 / depth, config={"model.d_model": None})
    with pytest.raises(NothingMatchedError, match=r"has model\.d_model, the x of --law width"):
        law_table(Runs.below(tmp_path), "width")


def test_an_interval_beyond_the_limits_of_the_exponent_is_refused() -> None:
    """The samples lie inside of the limits, and Student's factor leads out of them."""
    random = np.random.default_rng(5)
    refused = 0
    for _ in range(20):
        losses = [{s: 1 + x**-1.5 + 0.1 * random.normal() for s in range(3)} for x in DEPTHS]
        try:
            law = fit_law(DEPTHS, losses, draws=60)
        except NothingMatchedError as error:
            refused += "is not determined" in str(error)
        else:
            assert 1e-3 < law.a.low < law.a.high < 10
    assert 0 < refused < 20


@pytest.mark.parametrize(
    ("values", "seeds", "message"),
    [
        ([3.0, 2.5, 2.2], 3, "needs 4 values or more to fit three numbers; found 3"),
        ([2.0, 2.1, 2.2, 2.3], 3, "does not fall"),
        ([9.0, 2.0, 2.0, 2.0, 2.0], 3, "exponent is not determined"),
        ([3.0, 2.6, 2.3, 2.1], 1, "needs two seeds, or more than 4 values"),
        ([-3.0, -4.0, -4.5, -4.75, -4.9], 3, "found a loss of -4.9; the law needs losses above 0"),
    ],
)
def test_losses_without_a_law_are_refused(values: list[float], seeds: int, message: str) -> None:
    spread = [{seed: value + 1e-3 * seed for seed in range(seeds)} for value in values]
    with pytest.raises(NothingMatchedError, match=message):
        fit_law(DEPTHS[: len(values)], spread, draws=20)


def test_widths_of_equal_steps_have_a_law_of_their_flops(tmp_path: Path) -> None:
    for width, seed in product((2, 4, 8, 16, 32), (0, 1, 2)):
        make_run(
            tmp_path, seed=seed, lr=1e-3 * width, flops=10**9 * width, d_ff=4 * width,
            masked=1.5 + (1 + 0.01 * seed) / width, config={"model.d_model": width},
        )  # fmt: skip
    rows, notes = law_table(Runs.below(tmp_path), "compute")
    assert [(row["setting"], row["n"]) for row in rows] == [("DeepNorm, N = 6", 5)] and not notes
    assert rows[0]["a"] == pytest.approx(1, abs=1e-4)


def test_a_few_equal_flops_make_no_budgets(tmp_path: Path) -> None:
    """Half the depth for twice the steps costs as much."""
    for depth, steps, seed in product((2, 4, 8, 16, 32), (4, 8), (0, 1, 2)):
        make_run(
            tmp_path, depth=depth, seed=seed, lr=1e-3 + 1e-6 * steps, steps=steps,
            masked=1.5 + (1 + 0.01 * seed) / depth, flops=10**9 * depth,
        )  # fmt: skip
    rows, notes = law_table(Runs.below(tmp_path), "depth")
    assert [row["n"] for row in rows] == [5, 5] and not notes


@pytest.mark.slow
def test_the_command_fits_depth_at_each_budget_and_compute_at_each_depth(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for i, depth, seed in product(range(4), (2, 4, 8, 16), (0, 1, 2)):
        budget, steps = 1e10 * 4**i, 2 * (i + 1)
        make_run(
            tmp_path / "s", depth=depth, seed=seed, lr=1e-3 * (1 + i * depth), steps=steps,
            masked=1.5 + 0.5 / depth + 400 * budget**-0.3 + 1e-3 * noise.normal(),
            flops=int(budget / steps),
        )  # fmt: skip
    budgets = [f"DeepNorm, {4**i * 1e10:g} FLOPs" for i in range(4)]
    depths = [f"DeepNorm, N = {n}" for n in (2, 4, 8, 16)]
    for law, settings, exponent in (
        ("depth", budgets, pytest.approx(1, abs=0.2)),
        ("compute", depths, pytest.approx(0.3, abs=0.05)),
    ):
        words = ["fit", tmp_path / "s", "--law", law, "--json", "--to", tmp_path / law]
        laws = json.loads(typed(*words).stdout)
        assert [row["setting"] for row in laws] == settings
        assert all(row["a"] == exponent for row in laws)
        table = pd.read_csv(tmp_path / law / "law_fit.csv")
        assert list(table["panel"].unique()) == settings
        fits = table[table["kind"] == "fit"]
        assert fits["exponent"].tolist() == pytest.approx([-row["a"] for row in laws])
        curve = table[(table["kind"] == "law") & (table["panel"] == settings[0])]
        E, c, a = (laws[0][name] for name in "Eca")
        assert curve["y"].to_numpy() == pytest.approx((E + c * curve["x"] ** -a).to_numpy())
        assert (curve["low"] <= curve["y"]).all() and (curve["y"] <= curve["high"]).all()
    assert "found 1" in refusal(7, "fit", tmp_path / "s", "--law", "width")


@pytest.mark.parametrize("number", [2, 3])
def test_any_setting_below_three_seeds_has_a_note(number: int, tmp_path: Path) -> None:
    for scheme, seeds in (("deepnorm", number), ("pre_ln", 3)):
        for depth, seed in product((2, 4, 8, 16, 32), range(seeds)):
            masked = 1.5 + (1 + 0.01 * seed) / depth
            make_run(tmp_path, scheme=scheme, depth=depth, seed=seed, masked=masked)
    notes = law_table(Runs.below(tmp_path), "depth")[1]
    assert ("no interval: fewer than three seeds" in notes) == (number < 3)


def test_a_budget_reaches_a_tenth_above_its_least_flops(tmp_path: Path) -> None:
    """100 and 108 are one budget; 116 is another, though it is near 108."""
    for flops in (100, 108, 116):
        make_run(tmp_path, depth=flops, flops=10**9 * flops, steps=2)
    budgets = {run.get("model.depth"): one for run, one in budgets_of(Runs.below(tmp_path)).items()}
    assert budgets[100] == budgets[108] < budgets[116]
