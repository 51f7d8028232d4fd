"""Best learning rates over depth: parabola, exponent, cost of transfer, bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from deepstack.analysis.transfer import Losses, transfer

RATES = [1e-3 * 2**i for i in range(9)]
SEEDS = range(5)


def losses(best: Callable[[int, int], float], depths: tuple[int, ...] = (6, 24, 96)) -> Losses:
    """A parabola in log lr for each depth and seed, with its vertex at best(depth, seed)."""
    return {
        n: {lr: {s: 2.0 + math.log(lr / best(n, s)) ** 2 for s in SEEDS} for lr in RATES}
        for n in depths
    }


def test_the_vertex_of_a_parabola_is_found_between_the_rates() -> None:
    result = transfer(losses(lambda n, s: 0.0113), draws=20)
    assert [best.rate.value for best in result.best] == pytest.approx([0.0113] * 3)
    assert all(best.inside for best in result.best)
    assert result.exponent is not None
    assert result.exponent.value == pytest.approx(0, abs=1e-9)
    assert [result.costs[n].value for n in (6, 24, 96)] == pytest.approx([0, 0, 0], abs=0.2)  # type: ignore[union-attr]


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


def test_a_best_rate_at_the_edge_or_beside_a_divergence_is_not_inside() -> None:
    table = losses(lambda n, s: 1e-3)
    assert not transfer(table, draws=5).best[0].inside
    diverging = {
        n: {lr: {s: loss if lr < 0.02 else math.inf for s, loss in seeds.items()}
            for lr, seeds in by_rate.items()}
        for n, by_rate in losses(lambda n, s: 0.05).items()
    }  # fmt: skip
    best = transfer(diverging, draws=5).best[0]
    assert not best.inside
    assert best.rate.value == pytest.approx(0.016)


def test_a_rate_that_was_not_tried_has_no_cost() -> None:
    table = {6: losses(lambda n, s: 0.128)[6], 24: {1e-3: dict.fromkeys(SEEDS, 2.0)}}
    assert transfer(table, draws=5).costs[24] is None
