"""Best learning rates over depth: parabola, exponent, cost of transfer, bootstrap intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import typed
from helpers.plot_runs import make_run, make_runs

from deepstack.analysis.transfer import Losses, transfer

RATES = [1e-3 * 2**i for i in range(9)]
SEEDS = range(5)


def losses(best: Callable[[int, int], float], depths: tuple[int, ...] = (6, 24, 96)) -> Losses:
    """A parabola in log lr for each depth and seed, with its vertex at best(depth, seed)."""
    return {
        n: {lr: {s: 2.0 + math.log(lr / best(n, s)) ** 2 for s in SEEDS} for lr in RATES}
        for n in depths
    }


def test_the_exponent_and_the_cost_of_the_shallow_rate() -> None:
    result = transfer(losses(lambda n, s: 0.032 * (n / 6) ** -0.5), draws=20)
    assert result.exponent is not None
    assert result.exponent.value == pytest.approx(-0.5, abs=1e-6)
    cost = result.costs[96]
    assert cost is not None
    assert cost.value == pytest.approx(math.log(4) ** 2, rel=0.1)  # between two rates: linear


def test_the_interval_covers_the_spread_of_the_seeds() -> None:
    result = transfer(losses(lambda n, s: 0.01 * (n / 6) ** (-0.1 * s)))
    assert result.exponent is not None
    assert result.exponent.value == pytest.approx(-0.2, abs=1e-6)
    assert -0.4 <= result.exponent.low < -0.2 < result.exponent.high <= 0
    half = 1.96 * np.std([0, 0.1, 0.2, 0.3, 0.4]) / math.sqrt(5)
    assert result.exponent.high + 0.2 == pytest.approx(half, rel=0.25)


def test_a_rate_that_was_not_tried_has_no_cost() -> None:
    table = {6: losses(lambda n, s: 0.128)[6], 24: {1e-3: dict.fromkeys(SEEDS, 2.0)}}
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
