"""Best learning rates over depth, their exponent and the cost of another depth's rate."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.command_line import refusal, succeed, typed
from helpers.plot_runs import caption, make_chart, make_run, make_runs, rows

from deepstack.tools.transfer.table import Losses, transfer

RATES = [1e-3 * 2**i for i in range(9)]
SEEDS = range(5)
EDGE = [0.1, 0.2, 0.4], [2.0, 2.1, 2.3]  # rates, and losses of which the first is least


def parabolas(
    best: Callable[[int, int], float], seeds: range = SEEDS
) -> dict[int, dict[float, dict[int, float]]]:
    """A parabola in log lr for each depth and seed, with its vertex at best(depth, seed)."""
    return {
        n: {lr: {s: 2.0 + math.log(lr / best(n, s)) ** 2 for s in seeds} for lr in RATES}
        for n in (6, 24, 96)
    }


def test_the_exponent_and_the_cost_of_the_shallow_rate() -> None:
    result = transfer(parabolas(lambda n, s: 0.032 * (n / 6) ** -0.5), draws=20)
    assert result.exponent is not None
    assert result.exponent.value == pytest.approx(-0.5, abs=1e-6)
    cost = result.costs[96]
    assert cost is not None
    assert cost.value == pytest.approx(math.log(4) ** 2, abs=1e-6)
    assert result.costs[6] is not None and result.costs[6].value == pytest.approx(0, abs=1e-9)


def test_a_rate_between_two_tried_costs_what_its_curve_says() -> None:
    """Linear interpolation would let the best rate itself cost 0.12 here."""
    other = transfer(parabolas(lambda n, s: 0.032 * 2 ** (1.4 if n == 96 else 0.4)), draws=5)
    assert other.costs[96] and other.costs[96].value == pytest.approx(math.log(2) ** 2, abs=1e-9)
    result = transfer(parabolas(lambda n, s: 0.032 * 2**0.4), draws=5)
    assert [cost and cost.value for cost in result.costs.values()] == pytest.approx(
        [0] * 3, abs=1e-9
    )


def test_a_rate_at_which_a_seed_does_not_learn_does_not_win_by_its_mean(tmp_path: Path) -> None:
    """As by the rule of the best settings: 0.001 and not 0.002, whose mean is lower."""
    losses = {0.5: (3.2, 3.2, 3.2), 1: (3.0, 3.0, 3.0), 2: (2.7, 2.7, 3.4), 4: (3.4, 3.4, 3.4)}
    make_runs(
        tmp_path / "s", depth=(2,), lr=tuple(losses), seed=(0, 1, 2),
        masked=lambda depth, lr, seed: losses[lr][seed] - 0.2,
    )  # fmt: skip
    (row,) = json.loads(succeed("compare", tmp_path, "--transfer", "--json"))
    assert (row["best_lr"], row["inside"]) == (1.0, False)
    (best,) = json.loads(succeed("compare", tmp_path, "--best", "lr", "--json"))
    assert best["train.lr"] == 1.0


def test_the_interval_covers_the_spread_of_the_seeds() -> None:
    result = transfer(parabolas(lambda n, s: 0.01 * (n / 6) ** (-0.1 * s)))
    assert result.exponent is not None
    assert result.exponent.value == pytest.approx(-0.2, abs=1e-6)
    half = 2.776 * np.std([0, 0.1, 0.2, 0.3, 0.4], ddof=1) / math.sqrt(5)  # Student's t
    assert result.exponent.high + 0.2 == pytest.approx(half, rel=0.15)
    assert -0.2 - result.exponent.low == pytest.approx(half, rel=0.15)


def test_the_interval_of_a_cost_begins_at_0() -> None:
    result = transfer(parabolas(lambda n, s: 0.01 * (n / 6) ** (-0.2 * s)))
    cost = result.costs[96]
    assert cost is not None and cost.low == 0 < cost.value < cost.high
    assert cost.high > 2 * cost.value  # so that it would begin below 0


def test_the_rate_at_another_depth_follows_the_power_law_of_each_sample() -> None:
    result = transfer(parabolas(lambda n, s: 0.01 * (n / 6) ** (-0.1 * s)), at=384)
    assert result.predicted is not None
    assert result.predicted.value == pytest.approx(0.01 * 64**-0.2, rel=1e-6)
    logs = [math.log(0.01) - 0.1 * s * math.log(64) for s in SEEDS]
    half = 2.776 * np.std(logs, ddof=1) / math.sqrt(5)  # Student's t
    ends = [math.log(end) - np.mean(logs) for end in result.predicted[1:]]
    assert ends == pytest.approx([-half, half], rel=0.15)
    assert transfer(parabolas(lambda n, s: 0.01)).predicted is None, "nothing was asked for"
    edge = transfer(parabolas(lambda n, s: 1.0 if n == 96 else 0.01), draws=5, at=48)
    assert edge.predicted is None


def test_compare_prints_the_predicted_rate_and_how_it_was_made(tmp_path: Path) -> None:
    make_runs(
        tmp_path / "s", depth=(6, 24), lr=(0.01, 0.02, 0.04, 0.08), seed=(0, 1, 2),
        masked=lambda depth, lr, seed: 2.0 + math.log(lr * (depth / 6) ** 0.5 / 0.04) ** 2,
    )  # fmt: skip
    shown = typed("compare", tmp_path, "--transfer", "--at", "96", "--json")
    *measured, predicted = json.loads(shown.stdout)
    assert [row["predicted"] for row in measured] == [False, False]
    assert (predicted["depth"], predicted["predicted"]) == (96, True)
    assert predicted["best_lr"] == pytest.approx(0.01) and predicted["val_loss"] is None
    words = "N = 96: the rate of the power law through the best rates from N = 6 to 24"
    assert words in " ".join(shown.stderr.split())
    assert "--at: found without --transfer, which it needs" in refusal(
        2, "compare", tmp_path, "--at", "96"
    )


def test_rates_of_two_seeds_have_no_interval() -> None:
    losses = parabolas(lambda n, s: 0.01 * (n / 6) ** (-0.1 * s), seeds=range(2))
    result = transfer(losses)
    assert result.exponent is not None and math.isnan(result.exponent.low)
    assert all(math.isnan(end) for best in result.best for end in best.rate[1:])
    assert result.exponent.text(2) == f"−{-result.exponent.value:.2f}"


@pytest.mark.parametrize(
    ("best", "diverged", "words"),
    [
        (1.0, (), "the highest rate tried (0.256); add higher ones, or --refine train.lr"),
        (1e-5, (), "the lowest rate tried (0.001); add lower ones, or --refine train.lr"),
        (
            0.256,
            (0.256,),
            "0.128, next to a rate at which a seed fails; add rates between them, or",
        ),
    ],
)
def test_a_best_rate_at_an_edge_gives_no_exponent(
    best: float, diverged: tuple[float, ...], words: str
) -> None:
    losses = parabolas(lambda n, s: best if n == 96 else 0.01)
    for lr in diverged:
        losses[96][lr] = dict.fromkeys(SEEDS, math.inf)
    result = transfer(losses, draws=20)
    assert result.exponent is None and result.costs[96] is None
    assert result.costs[24] is not None and result.costs[24].value < 0.1
    assert [one.inside for one in result.best] == [True, True, False]
    assert math.isnan(result.best[2].rate.low)
    (advice,) = result.advice
    assert advice.startswith(f"N = 96: best at {words}")


def test_a_rate_that_was_not_tried_has_no_cost() -> None:
    table: Losses = {6: parabolas(lambda n, s: 0.128)[6], 24: {1e-3: dict.fromkeys(SEEDS, 2.0)}}
    assert transfer(table, draws=5).costs[24] is None


def test_a_rate_outside_of_those_tried_has_no_cost() -> None:
    """The best rate at N = 6, 0.002, lies below all rates of N = 24, whose own best is inside."""
    losses = parabolas(lambda n, s: 0.002 if n == 6 else 0.032)
    table = {6: losses[6], 24: {lr: losses[24][lr] for lr in RATES[3:]}, 96: losses[96]}
    result = transfer(table, draws=5)
    assert [best.inside for best in result.best] == [True] * 3
    assert result.costs[24] is None
    assert result.costs[96] is not None  # a rate that was tried, though 0.002 costs much there
    assert result.costs[96].value == pytest.approx(math.log(16) ** 2, rel=1e-6)


def test_only_seeds_that_every_depth_and_rate_share_count() -> None:
    """Seed 4 lacks one rate of N = 96; at the others its losses would move every best rate."""
    shared = parabolas(lambda n, s: 0.01 * (n / 6) ** (-0.1 * s), seeds=range(4))
    more = parabolas(lambda n, s: 0.001 if s == 4 else 0.01 * (n / 6) ** (-0.1 * s))
    del more[96][RATES[2]][4]
    assert transfer(more, draws=50) == transfer(shared, draws=50)


def test_a_rate_at_which_a_seed_diverged_is_not_the_best(tmp_path: Path) -> None:
    """However low its last loss before: seed 1 diverges at the highest rate."""
    make_runs(
        tmp_path / "s", depth=(2, 4), lr=(1, 2, 4, 8), seed=(0, 1),
        masked=lambda depth, lr, seed: 1.0 if lr == 8 else 2.0 + abs(lr - 2.2),
        state=lambda depth, lr, seed: "diverged" if (lr, seed) == (8, 1) else "done",
    )  # fmt: skip
    shown = typed("compare", tmp_path, "--transfer", "--json")
    for row in json.loads(shown.stdout):
        assert row["inside"] and 1 < row["best_lr"] < 4
        assert row["val_loss"] == pytest.approx(2.2)


def test_a_table_has_a_row_for_each_setting_and_depth(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert "finished runs of two learning rates" in refusal(7, "compare", tmp_path, "--transfer")
    for n, exponents in enumerate(({}, {"v": 0.5, "o": 0.5})):
        make_runs(
            tmp_path / "s", depth=(2, 4), lr=(1 + n, 3 + n, 9 + n),
            masked=lambda depth, lr: 2.0 + abs(lr - 3.5) / depth,
            config=lambda depth, lr, n=n, given=exponents: {
                "train.lr": (lr - n) / 1e3, "train.lr_exponents": given
            },
        )  # fmt: skip
    shown = typed("compare", tmp_path, "--transfer", "--json")
    rows = json.loads(shown.stdout)
    assert [(row["setting"], row["depth"]) for row in rows] == [
        ("equal rates", 2), ("equal rates", 4), ("rates by depth", 2), ("rates by depth", 4)
    ]  # fmt: skip
    assert all(1e-3 < row["best_lr"] < 9e-3 and row["seeds"] == 1 for row in rows)
    assert all(row["inside"] and row["exponent_low"] is None for row in rows)
    assert "no interval: fewer than three seeds" in shown.stderr
    message = refusal(2, "compare", tmp_path, "--transfer", "--sort", "depth")
    assert "--sort: found with --transfer, whose table does not use it" in message


def test_rates_that_are_all_too_small_give_advice_and_no_exponent(tmp_path: Path) -> None:
    make_runs(
        tmp_path / "s", depth=(2, 4), lr=(1, 2, 4), seed=(0, 1, 2),
        masked=lambda depth, lr, seed: 2.0 - 0.1 * lr / depth + 0.01 * seed,
        config=lambda depth, lr, seed: {"train.lr": lr / 1e3},
    )  # fmt: skip
    shown = typed("compare", tmp_path, "--transfer", "--json")
    assert all(row["exponent"] is None and not row["inside"] for row in json.loads(shown.stdout))
    advice = "best at the highest rate tried (0.004); add higher ones, or --refine train.lr"
    assert f"N = 2: {advice}" in shown.stderr and f"N = 4: {advice}" in shown.stderr
    chart = make_chart("best_lr_vs_depth", tmp_path / "s")
    assert advice in caption(chart) and rows(chart, kind="fit").empty


def test_a_cost_needs_a_best_rate_inside_at_the_smallest_depth_too() -> None:
    shallow = {rate: dict.fromkeys(range(3), loss) for rate, loss in zip(*EDGE, strict=True)}
    deep = {rate: {s: 2.3 - 0.2 * (rate == 0.2) for s in range(3)} for rate in EDGE[0]}
    assert transfer({4: shallow, 16: deep}, draws=5).costs == {4: None, 16: None}


@pytest.mark.parametrize("seeds", [(2, 3), (3, 3)])
def test_any_setting_below_three_seeds_has_a_note(seeds: tuple[int, int], tmp_path: Path) -> None:
    for scheme, number in zip(("deepnorm", "pre_ln"), seeds, strict=True):
        make_runs(
            tmp_path / "s", scheme=(scheme,), depth=(2, 4), lr=(1, 2, 4), seed=tuple(range(number)),
            masked=lambda scheme, depth, lr, seed: 2.0 + abs(lr - 2.1) / depth + 0.01 * seed,
            config=lambda scheme, depth, lr, seed: {"train.lr": lr / 1e3},
        )  # fmt: skip
    shown = typed("compare", tmp_path, "--transfer", "--json")
    assert ("no interval: fewer than three seeds" in shown.stderr) == (min(seeds) < 3)


def test_a_depth_at_which_no_rate_learns_has_no_best_rate(tmp_path: Path) -> None:
    """Else the least of losses at chance would move the exponent."""
    losses = {0.001: 0.2, 0.002: 0.0, 0.004: 0.1}
    make_runs(
        tmp_path, depth=(6, 24, 96), lr=(*losses,), seed=(0, 1, 2),
        masked=lambda depth, lr, seed: losses[lr] + (3.3 if depth == 96 else 2.5) + 0.001 * seed,
    )  # fmt: skip
    done = typed("compare", tmp_path, "--transfer", "--json")
    assert {row["depth"] for row in json.loads(done.stdout)} == {6, 24}
    assert "DeepNorm, left out: N = 96, where no rate learns" in done.stderr
    chart = make_chart("best_lr_vs_depth", tmp_path)
    assert set(rows(chart, kind="point")["x"]) == {6, 24}
    assert "left out: N = 96, where no rate learns" in caption(chart)
