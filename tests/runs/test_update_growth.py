"""The growth of ‖ΔF‖ with depth is stated by local exponents, and by one only where they agree."""

import math
import statistics
from pathlib import Path

import pytest
from helpers.command_line import succeed
from helpers.plot_runs import make_run, make_runs
from scipy.stats import t

import deepstack
from deepstack.plots import CHARTS
from deepstack.runs import Runs
from deepstack.runs.update_growth import growths_of
from deepstack.runs.words import growth_sentence

DEPTHS = (6, 24, 96)
NOISE = {0: 1.0, 1: 1.02, 2: 0.97}  # factor of a seed at the greatest depth


def made(root: Path, updates: dict[int, float], noise: dict[int, float] = NOISE) -> Runs:
    """Runs with this first ‖ΔF‖ by depth."""
    make_runs(
        root, depth=(*updates,), seed=(*noise,),
        updates=lambda depth, seed: [
            updates[depth] * (noise[seed] if depth == max(updates) else 1.0) * step
            for step in (1, 2)
        ],
    )  # fmt: skip
    return Runs.below(root)


def power(exponent: float) -> dict[int, float]:
    return {depth: 0.01 * depth**exponent for depth in DEPTHS}


def test_a_local_exponent_is_a_ratio_of_logarithms_with_an_interval(tmp_path: Path) -> None:
    (growth,) = growths_of(made(tmp_path, power(0.5)))
    assert [(one.first, one.last) for one in growth.local] == [(6, 24), (24, 96)]
    slopes = [0.5 + math.log(factor) / math.log(4) for factor in NOISE.values()]
    half = t.ppf(0.975, 2) * statistics.stdev(slopes) / math.sqrt(3)
    exponent = growth.local[1].exponent
    assert exponent.value == pytest.approx(statistics.fmean(slopes))
    assert exponent.low == pytest.approx(statistics.fmean(slopes) - half)
    assert exponent.high == pytest.approx(statistics.fmean(slopes) + half)
    assert growth.local[0].exponent.value == pytest.approx(0.5)
    sentence = growth_sentence(growth)
    assert sentence.startswith("The first ‖ΔF‖ of DeepNorm follows N^0.50 from N = 6 to 96 (95 %")
    assert "0.50 (0.50 to 0.50) from N = 6 to 24 and 0.50 (0.45 to 0.54) from N = 24" in sentence


def test_exponents_that_differ_are_no_single_power(tmp_path: Path) -> None:
    updates = {6: 0.1, 24: 0.1, 96: 0.4}  # exponent 0, then 1
    (growth,) = growths_of(made(tmp_path, updates))
    assert not growth.agree and growth.whole.value == pytest.approx(0.5, abs=0.02)
    sentence = growth_sentence(growth)
    assert "follows no single power of N: the exponent is 0.00 (0.00 to 0.00) from N" in sentence
    assert "N^" not in sentence and " 0.5" not in sentence


def test_wide_intervals_leave_it_undecided(tmp_path: Path) -> None:
    (growth,) = growths_of(made(tmp_path, power(0.5), {0: 0.5, 1: 1.0, 2: 2.0}))
    assert growth.agree and not growth.is_exact
    sentence = growth_sentence(growth)
    assert sentence.startswith("It is undecided whether the first ‖ΔF‖ of DeepNorm follows one")
    assert "N^" not in sentence


def test_two_seeds_have_no_interval_and_two_depths_one_exponent(tmp_path: Path) -> None:
    (growth,) = growths_of(made(tmp_path / "a", power(1.0), {0: 1.0, 1: 1.0}))
    assert growth_sentence(growth) == (
        "The exponent of N in the first ‖ΔF‖ of DeepNorm is 1.00 from N = 6 to 24 and 1.00 from "
        "N = 24 to 96 (2 seeds, no interval below 3)."
    )
    (growth,) = growths_of(made(tmp_path / "b", {6: 0.1, 24: 0.2}, dict.fromkeys(range(3), 1.0)), 2)
    assert growth_sentence(growth) == (
        "The exponent of N in ‖ΔF‖ at step 2 of DeepNorm is 0.50 (0.50 to 0.50) from N = 6 to 24 "
        "(95 % interval, 3 seeds)."
    )


def test_saturated_and_diverged_depths_are_left_out_and_rates_are_named(tmp_path: Path) -> None:
    made(tmp_path, power(0.5))
    for seed in (0, 1, 2):
        make_run(tmp_path, depth=200, seed=seed, updates=[9.0, 9.0])  # unrelated to F_0
        make_run(tmp_path, depth=400, seed=seed, lr=1e-4, state="diverged", updates=[0.3])
    (growth,) = growths_of(Runs.below(tmp_path))
    assert growth.left_out == (200, 400) and growth.local[-1].last == 96
    assert growth_sentence(growth).endswith(
        "; each depth has its own learning rate; N = 200 and 400 is left out, saturated or "
        "diverged."
    )


def test_one_depth_has_no_growth(tmp_path: Path) -> None:
    make_run(tmp_path)
    make_run(tmp_path, seed=1)
    assert growths_of(Runs.below(tmp_path)) == []


def test_answer_and_report_state_the_same_growth(tmp_path: Path) -> None:
    pytest.importorskip("deepstack.tools.answer")
    finding_of = pytest.importorskip("deepstack.tools.report.finding").finding_of
    runs = made(tmp_path / "study", power(0.5))
    (growth,) = growths_of(runs)
    sentence = growth_sentence(growth)
    assert sentence in deepstack.answer(runs).found.details
    updates = CHARTS["update_vs_depth"](runs).data
    finding = finding_of(runs, (), updates)["sentences"]
    assert sentence in finding and not any("about a power" in one for one in finding)
    assert any(one.startswith("‖ΔF‖ at step 2 of DeepNorm follows N^0.50") for one in finding)
    page = tmp_path / "page"
    succeed("answer", tmp_path / "study", "--format", "latex", "--to", page)
    assert r"\|" in (page / "answer.tex").read_text(encoding="utf-8")


def test_a_chart_has_an_exponent_only_of_a_power(tmp_path: Path) -> None:
    """A bend of 10 % over two thirds of the depths, beside seeds that agree within 1 %."""
    powers = {"deepnorm": 0.0, "pre_ln": 0.1}
    make_runs(
        tmp_path, depth=(6, 24, 96), seed=(0, 1, 2), scheme=tuple(powers),
        updates=lambda depth, seed, scheme: [
            0.001 * depth**0.5 * (1 + powers[scheme] * (depth == 24)) * (1 + 0.01 * seed)
        ] * 2,
    )  # fmt: skip
    data = CHARTS["update_vs_depth"](Runs.below(tmp_path)).data
    fits = data[data["kind"] == "fit"]
    assert set(fits["series"]) == {"DeepNorm"}
    assert fits["exponent"].to_numpy(float) == pytest.approx(0.5)
