"""Fits with bootstrap intervals: a law of losses, and best learning rates over depth."""

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import typed
from helpers.plot_runs import make_run, make_runs

from deepstack.analysis.scaling_law import fit_law, law_table
from deepstack.analysis.transfer import Losses, transfer
from deepstack.errors import NothingMatchedError
from deepstack.records import find_runs

# --- the law of losses -----------------------------------------------------------------------


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


def test_intervals_hold_the_true_values_most_of_the_time() -> None:
    laws = [fit_law(DEPTHS, noisy_losses(seed), draws=60) for seed in range(20)]
    for name, true in (("E", E), ("a", A), ("c", C)):
        inside = [getattr(law, name).low <= true <= getattr(law, name).high for law in laws]
        assert sum(inside) >= 14  # nominally 19; a bootstrap over six seeds is a little narrow
    width = np.mean([law.a.high - law.a.low for law in laws])
    spread = np.std([law.a.value for law in laws])
    assert 2 < width / spread < 6  # 3.9 for a normal distribution
    alone = fit_law(DEPTHS, noisy_losses(3, seeds=1), draws=60)  # sampled by points
    assert alone.a.low < A < alone.a.high and alone.seeds == 1


def test_losses_without_a_floor_have_none() -> None:
    values = [{s: 3 * x**-0.3 * (1 + 1e-3 * s) for s in range(3)} for x in DEPTHS]
    law = fit_law(DEPTHS, values, draws=20)
    assert law.E.value == 0 and law.a.value == pytest.approx(0.3, abs=1e-4)


@pytest.mark.parametrize(
    ("x", "values", "message"),
    [
        ([2, 4, 8], [3.0, 2.5, 2.2], "needs 4 values or more to fit three numbers; found 3"),
        ([2, 4, 8, 16], [2.0, 2.1, 2.2, 2.3], "does not fall"),
        ([2, 4, 8, 16, 32], [9.0, 2.0, 2.0, 2.0, 2.0], "interval of the exponent has no end"),
    ],
)
def test_what_has_no_law_is_refused(x: list[int], values: list[float], message: str) -> None:
    spread = [{0: v, 1: v + 1e-3, 2: v - 1e-3} for v in values]
    with pytest.raises(NothingMatchedError, match=message):
        fit_law(x, spread, draws=20)


def test_four_points_of_one_seed_have_no_interval() -> None:
    with pytest.raises(NothingMatchedError, match="needs two seeds, or more than 4 values"):
        fit_law(DEPTHS[:4], noisy_losses(0, seeds=1)[:4], draws=20)


def test_widths_of_equal_steps_have_a_law_of_their_flops(tmp_path: Path) -> None:
    for width, seed in product((2, 4, 8, 16, 32), (0, 1)):
        make_run(
            tmp_path, seed=seed, lr=1e-3 * width, flops=10**9 * width, d_ff=4 * width,
            masked=1.5 + (1 + 0.01 * seed) / width, config={"model.d_model": width},
        )  # fmt: skip
    rows, notes = law_table(find_runs(tmp_path), "compute")
    assert [(row["setting"], row["n"]) for row in rows] == [("DeepNorm, N = 6", 5)] and not notes
    assert rows[0]["a"] == pytest.approx(1, abs=1e-4)


def test_a_few_equal_flops_make_no_budgets(tmp_path: Path) -> None:
    """Half the depth for twice the steps costs as much."""
    for depth, steps, seed in product((2, 4, 8, 16, 32), (4, 8), (0, 1)):
        make_run(
            tmp_path, depth=depth, seed=seed, lr=1e-3 + 1e-6 * steps, steps=steps,
            masked=1.5 + (1 + 0.01 * seed) / depth, flops=10**9 * depth,
        )  # fmt: skip
    rows, notes = law_table(find_runs(tmp_path), "depth")
    assert [row["n"] for row in rows] == [5, 5] and not notes


def test_the_command_fits_depth_at_each_budget_and_compute_at_each_depth(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for i, depth, seed in product(range(4), (2, 4, 8, 16), (0, 1)):
        budget, steps = 1e10 * 4**i, 2 * (i + 1)
        make_run(
            tmp_path / "s", depth=depth, seed=seed, lr=1e-3 * (1 + i * depth), steps=steps,
            masked=1.5 + 0.5 / depth + 400 * budget**-0.3 + 1e-3 * noise.normal(),
            flops=int(budget / steps),
        )  # fmt: skip
    for law, settings, exponent in (
        (
            "depth",
            [f"DeepNorm, {4**i * 1e10:g} FLOPs" for i in range(4)],
            pytest.approx(1, abs=0.2),
        ),
        ("compute", [f"DeepNorm, N = {n}" for n in (2, 4, 8, 16)], pytest.approx(0.3, abs=0.05)),
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
    refused = typed("fit", tmp_path / "s", "--law", "width")
    assert refused.exit_code == 7 and "found 1" in refused.stderr


# --- best learning rates ---------------------------------------------------------------------


RATES = [1e-3 * 2**i for i in range(9)]
SEEDS = range(5)


def parabolas(best: Callable[[int, int], float], depths: tuple[int, ...] = (6, 24, 96)) -> Losses:
    """A parabola in log lr for each depth and seed, with its vertex at best(depth, seed)."""
    return {
        n: {lr: {s: 2.0 + math.log(lr / best(n, s)) ** 2 for s in SEEDS} for lr in RATES}
        for n in depths
    }


def test_the_exponent_and_the_cost_of_the_shallow_rate() -> None:
    result = transfer(parabolas(lambda n, s: 0.032 * (n / 6) ** -0.5), draws=20)
    assert result.exponent is not None
    assert result.exponent.value == pytest.approx(-0.5, abs=1e-6)
    cost = result.costs[96]
    assert cost is not None
    assert cost.value == pytest.approx(math.log(4) ** 2, rel=0.1)  # between two rates: linear


def test_the_interval_covers_the_spread_of_the_seeds() -> None:
    result = transfer(parabolas(lambda n, s: 0.01 * (n / 6) ** (-0.1 * s)))
    assert result.exponent is not None
    assert result.exponent.value == pytest.approx(-0.2, abs=1e-6)
    assert -0.4 <= result.exponent.low < -0.2 < result.exponent.high <= 0
    half = 1.96 * np.std([0, 0.1, 0.2, 0.3, 0.4]) / math.sqrt(5)
    assert result.exponent.high + 0.2 == pytest.approx(half, rel=0.25)


def test_a_rate_that_was_not_tried_has_no_cost() -> None:
    table = {6: parabolas(lambda n, s: 0.128)[6], 24: {1e-3: dict.fromkeys(SEEDS, 2.0)}}
    assert transfer(table, draws=5).costs[24] is None


def test_a_table_has_a_row_for_each_setting_and_depth(tmp_path: Path) -> None:
    make_run(tmp_path)
    refused = typed("compare", tmp_path, "--transfer")
    assert refused.exit_code == 7
    assert "no study has finished runs of two learning rates" in refused.stderr
    for n, exponents in enumerate(({}, {"v": 0.5, "o": 0.5})):
        make_runs(
            tmp_path / "s", depth=(2, 4), lr=(1 + n, 3 + n, 9 + n),
            masked=lambda depth, lr: 2.0 + abs(lr - 3.5) / depth,
            config=lambda depth, lr, n=n, given=exponents: {
                "train.lr": (lr - n) / 1e3, "train.lr_exponents": given
            },
        )  # fmt: skip
    rows = json.loads(typed("compare", tmp_path, "--transfer", "--json").stdout)
    assert [(row["setting"], row["depth"]) for row in rows] == [
        ("equal rates", 2), ("equal rates", 4), ("rates by depth", 2), ("rates by depth", 4)
    ]  # fmt: skip
    assert all(1e-3 < row["best_lr"] < 9e-3 and row["seeds"] == 1 for row in rows)
