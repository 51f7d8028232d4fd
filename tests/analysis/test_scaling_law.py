"""The fit of L = E + c x^(-a), on losses made from a known law with noise."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import typed
from helpers.plot_runs import make_run

from deepstack.analysis.scaling_law import fit_law
from deepstack.errors import NothingMatchedError

DEPTHS = [2, 4, 8, 16, 32, 64]
E, C, A = 1.7, 2.0, 0.6


def losses(seed: int, *, noise: float = 0.01, seeds: int = 6) -> list[dict[int, float]]:
    random = np.random.default_rng(seed)
    return [{s: E + C * x**-A + noise * random.normal() for s in range(seeds)} for x in DEPTHS]


def test_a_law_without_noise_is_found_exactly() -> None:
    law = fit_law([1e11 * x for x in DEPTHS], losses(0, noise=1e-9), draws=5)
    assert (law.E.value, law.a.value) == pytest.approx((E, A), rel=1e-6)
    assert law.c.value == pytest.approx(C * 1e11**A, rel=1e-5)
    assert law.residual < 1e-8 and (law.n, law.seeds) == (6, 6)


def test_intervals_hold_the_true_values_most_of_the_time() -> None:
    laws = [fit_law(DEPTHS, losses(seed), draws=60) for seed in range(20)]
    for name, true in (("E", E), ("a", A), ("c", C)):
        inside = [getattr(law, name).low <= true <= getattr(law, name).high for law in laws]
        assert sum(inside) >= 14  # nominally 19; a bootstrap over six seeds is a little narrow
    width = np.mean([law.a.high - law.a.low for law in laws])
    spread = np.std([law.a.value for law in laws])
    assert 2 < width / spread < 6  # 3.9 for a normal distribution
    alone = fit_law(DEPTHS, losses(3, seeds=1), draws=60)  # sampled by points
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
