"""Charts against training FLOPs: budgets, the size of the least loss, and runs without a place."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from helpers.plot_runs import caption, make_chart, make_run, rows

DEPTHS, SEEDS = (2, 8, 32), (0, 1)


def least(budget: float) -> float:
    """The depth at which the planted loss is least."""
    return 6.0 * (budget / 1e12) ** 0.5


def study(root: Path, size: str = "model.depth") -> None:
    """Losses that are parabolas in log size, trained with rates chosen for each cell."""
    for budget in (1e12, 4e12):
        for n in DEPTHS:
            for seed in SEEDS:
                steps = 40 if budget > 1e12 else 10
                away = math.log(n / least(budget))
                config = {size: n, "model.d_ff": 4 * n}
                make_run(
                    root / "s" / f"{budget:g}", depth=n if size == "model.depth" else 6,
                    seed=seed, lr=1e-3 * n * (1 + (steps > 10)), steps=steps,
                    config=config,
                    masked=2.5 - 0.2 * math.log10(budget / 1e12) + 0.1 * away**2 + 0.01 * seed,
                    flops=int(budget / steps * (1 + 0.02 * (n == 8))),
                )  # fmt: skip
    for path in (root / "s").glob("*/*"):
        path.rename(root / "s" / f"{path.parent.name}-{path.name}")


@pytest.mark.parametrize("size", ["model.depth", "model.d_model"])
def test_the_least_loss_at_equal_flops_is_found_inside(tmp_path: Path, size: str) -> None:
    study(tmp_path, size)
    chart = make_chart("iso_flop", tmp_path)
    minima = rows(chart, kind="minimum").set_index("series")
    assert minima["x"].to_dict() == pytest.approx({"1e+12 FLOPs": 6.0, "4e+12 FLOPs": 12.0})
    assert minima["y"].iloc[0] == pytest.approx(2.505)
    points = rows(chart, kind="point", series="1e+12 FLOPs")
    assert points["x"].tolist() == list(DEPTHS) and set(points["n"]) == {2}
    assert ("width" if size == "model.d_model" else "depth N") in caption(chart)


def test_loss_against_flops_has_a_line_for_each_depth(tmp_path: Path) -> None:
    study(tmp_path)
    chart = make_chart("loss_vs_compute", tmp_path)
    middle = rows(chart, series="DeepNorm, N = 8")
    assert middle["x"].tolist() == pytest.approx([1.02e12, 4.08e12])
    bent = 0.1 * math.log(8 / least(4e12)) ** 2
    assert middle["y"].iloc[1] == pytest.approx(2.505 - 0.2 * math.log10(4) + bent)
    assert len(chart.data) == 6


def test_one_budget_shows_losses_on_the_way(tmp_path: Path) -> None:
    make_run(tmp_path, steps=4, masked=2.5)
    chart = make_chart("loss_vs_compute", tmp_path)
    assert chart.data[["x", "y"]].to_numpy().tolist() == [[4e9, 2.5]]
    assert "on their way" in caption(chart)
