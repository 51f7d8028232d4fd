"""Fits with intervals: laws of losses, best learning rates over depth, the coordinate check."""

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.command_line import refusal, typed
from helpers.plot_runs import caption, make_chart, make_run, make_runs, rows
from helpers.small_runs import small
from safetensors.torch import load_file
from torch import Tensor

import deepstack
from deepstack.analysis.coordinates import coordinates, verdict
from deepstack.analysis.scaling_law import fit_law, law_table
from deepstack.analysis.transfer import Losses, transfer
from deepstack.errors import ConfigError, NothingMatchedError
from deepstack.model import build_model
from deepstack.records import RunFolder, find_runs
from deepstack.tasks import task_of

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


@pytest.mark.parametrize(
    ("values", "seeds", "message"),
    [
        ([3.0, 2.5, 2.2], 3, "needs 4 values or more to fit three numbers; found 3"),
        ([2.0, 2.1, 2.2, 2.3], 3, "does not fall"),
        ([9.0, 2.0, 2.0, 2.0, 2.0], 3, "exponent is not determined"),
        ([3.0, 2.6, 2.3, 2.1], 1, "needs two seeds, or more than 4 values"),
    ],
)
def test_what_has_no_law_is_refused(values: list[float], seeds: int, message: str) -> None:
    spread = [{seed: value + 1e-3 * seed for seed in range(seeds)} for value in values]
    with pytest.raises(NothingMatchedError, match=message):
        fit_law(DEPTHS[: len(values)], spread, draws=20)


def test_widths_of_equal_steps_have_a_law_of_their_flops(tmp_path: Path) -> None:
    for width, seed in product((2, 4, 8, 16, 32), (0, 1, 2)):
        make_run(
            tmp_path, seed=seed, lr=1e-3 * width, flops=10**9 * width, d_ff=4 * width,
            masked=1.5 + (1 + 0.01 * seed) / width, config={"model.d_model": width},
        )  # fmt: skip
    rows, notes = law_table(find_runs(tmp_path), "compute")
    assert [(row["setting"], row["n"]) for row in rows] == [("DeepNorm, N = 6", 5)] and not notes
    assert rows[0]["a"] == pytest.approx(1, abs=1e-4)


def test_a_few_equal_flops_make_no_budgets(tmp_path: Path) -> None:
    """Half the depth for twice the steps costs as much."""
    for depth, steps, seed in product((2, 4, 8, 16, 32), (4, 8), (0, 1, 2)):
        make_run(
            tmp_path, depth=depth, seed=seed, lr=1e-3 + 1e-6 * steps, steps=steps,
            masked=1.5 + (1 + 0.01 * seed) / depth, flops=10**9 * depth,
        )  # fmt: skip
    rows, notes = law_table(find_runs(tmp_path), "depth")
    assert [row["n"] for row in rows] == [5, 5] and not notes


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


# --- best learning rates ---------------------------------------------------------------------


RATES = [1e-3 * 2**i for i in range(9)]
SEEDS = range(5)


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
    assert cost.value == pytest.approx(math.log(4) ** 2, rel=0.1)  # between two rates: linear


def test_the_interval_covers_the_spread_of_the_seeds() -> None:
    result = transfer(parabolas(lambda n, s: 0.01 * (n / 6) ** (-0.1 * s)))
    assert result.exponent is not None
    assert result.exponent.value == pytest.approx(-0.2, abs=1e-6)
    half = 2.776 * np.std([0, 0.1, 0.2, 0.3, 0.4], ddof=1) / math.sqrt(5)  # Student's t
    assert result.exponent.high + 0.2 == pytest.approx(half, rel=0.15)
    assert -0.2 - result.exponent.low == pytest.approx(half, rel=0.15)


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
        (0.256, (0.256,), "0.128, next to a rate that diverged; add rates between them, or"),
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


# --- the coordinate check --------------------------------------------------------------------


def test_exponents_and_verdicts_are_those_of_the_values(tmp_path: Path) -> None:
    """Changes of coordinates grow as d^(1/2) N^(1/2), 1 % apart between seeds."""
    widths = (32, 64, 128)
    for d, depth, seed in product(widths, (4, 16), (0, 1, 2)):
        at = {"model.d_model": d, "train.lr": 1e-3}
        path = make_run(tmp_path, depth=depth, seed=seed, lr=d, d_ff=4 * d, config=at)
        noise = 1 + 0.01 * seed * (d / 32)
        update = np.linspace(0.5, 1, depth) * (d * depth) ** 0.5 * noise
        size = np.full(depth, d**0.5)
        records = {"stream_norm": [size, size], "stream_update": [0 * size, update * d**0.5]}
        RunFolder(path).write_layers({k: np.array(v) for k, v in records.items()}, [0, 5])
    table = json.loads(typed("compare", tmp_path, "--coordinates", "--json").stdout)
    by_key = {
        (row["quantity"], row["layer"], row["over"], row.get("depth", row.get("width"))): row
        for row in table
    }
    update = by_key["update", "last", "width", 16]
    assert update["exponent"] == pytest.approx(0.5, abs=0.03)
    assert update["low"] < update["exponent"] < update["high"]
    known = {"step": 5, "seeds": 3, "verdict": "grows with width"}
    assert update | known == update
    assert by_key["size", "middle", "width", 4]["verdict"] == "does not depend on width"
    assert by_key["update", "last", "depth", 32]["exponent"] == pytest.approx(0.5)
    assert {row["layer"] for row in table} == {"first", "middle", "last", "F"}
    chart = make_chart("coordinate_check", tmp_path)
    assert "update of the last layer: depth 4 grows with width: " in caption(chart)
    printed = [row["exponent"] for row in table if row["over"] == "width"]
    assert sorted(rows(chart, kind="fit")["exponent"]) == pytest.approx(sorted(printed))
    lines = rows(chart, kind="point", series="depth 16, last")
    assert lines["x"].tolist() == [*widths, *widths] and lines["n"].tolist() == [3] * 6


def test_values_per_coordinate_are_of_the_first_the_middle_and_the_last_layer(
    tmp_path: Path,
) -> None:
    for depth in (4, 5):
        path = make_run(tmp_path, depth=depth, config={"model.d_model": 25})
        norms = np.arange(1.0, depth + 1) * 5
        values = {"stream_norm": np.array([norms]), "stream_update": np.array([10 * norms])}
        RunFolder(path).write_layers(values, [5])
    table = coordinates(find_runs(tmp_path), 5).set_index(["quantity", "depth", "layer"])["value"]
    for depth, wanted in {4: (1.0, 2.0, 4.0), 5: (1.0, 3.0, 5.0)}.items():  # 5 is the root of 25
        for layer, value in zip(("first", "middle", "last"), wanted, strict=True):
            assert table["size", depth, layer] == pytest.approx(value)
            assert table["update", depth, layer] == pytest.approx(10 * value)


@pytest.mark.parametrize(
    ("interval", "words"),
    [
        ((0.02, -0.01, 0.05), "does not depend on width"), ((0.05, 0.01, 0.09), "does not depend"),
        ((0.3, 0.2, 0.4), "grows"), ((-0.3, -0.5, -0.1), "falls"), ((0.0, -0.2, 0.2), "undecided"),
        ((0.0, float("nan"), float("nan")), "undecided"),
    ],
)  # fmt: skip
def test_a_verdict_needs_an_interval(interval: tuple[float, float, float], words: str) -> None:
    assert verdict(*interval, "width").startswith(words)


def outputs_of_layers(built: Any, tokens: Tensor) -> list[Tensor]:
    states: list[Tensor] = []
    for layer in built.model.layers:
        layer.register_forward_hook(lambda module, args, out: states.append(out))
    with torch.no_grad(), built.model.unfused():
        built.model.eval()(tokens)
    return states


@pytest.mark.parametrize("family", ["encoder", "encoder_decoder"])
def test_the_change_of_the_stream_is_that_of_two_passes(family: str, tmp_path: Path) -> None:
    config = small(
        model__family=family, model__scheme="post_ln", task__name="reverse",
        log__stream_update=True, train__lr=0.01,
    )  # fmt: skip
    run = deepstack.train(config, out=tmp_path)
    steps, values = run.layers("stream_update")
    assert steps[-1] == 12 and (values[0] == 0).all()
    task = task_of(config)
    tokens = torch.from_numpy(task.probe_batch(2).inputs)
    start, end = (build_model(config, vocab_size=task.vocab_size) for _ in range(2))
    end.load(load_file(run.path / "checkpoint" / "12" / "weights.safetensors"))
    pairs = zip(outputs_of_layers(end, tokens), outputs_of_layers(start, tokens), strict=True)
    expected = [float((after - before).norm(dim=-1).mean()) for after, before in pairs]
    assert values[-1] == pytest.approx(expected, rel=1e-4) and min(expected) > 0.01
    with pytest.raises(ConfigError, match=r"stream_update: found true, unused under"):
        small(log__stream_update=True, log__layers_every=0)
