"""The finding of a report is computed from its runs."""

import math
import statistics
from pathlib import Path

import pytest
from helpers.plot_runs import make_chart, make_run, make_runs, update, without_layout
from helpers.report_pages import Page, draw_only
from scipy.stats import t

from deepstack.cli.finding import sweep_finding
from deepstack.plots.drawing import MOST_LINES
from deepstack.records import find_runs
from deepstack.runs import Runs
from deepstack.tools.report.finding import best_of_depths, finding_of
from deepstack.tools.report.page import report

LOSSES = {
    ("deepnorm", 6): (2.0, 2.1, 2.2), ("pre_ln", 6): (2.1, 2.2, 2.31), ("post_ln", 6): (2.6,) * 3,
    ("deepnorm", 48): (2.4, 2.2, 2.5), ("pre_ln", 48): (2.3, 2.4, 2.2), ("post_ln", 48): (1.0,) * 3,
}  # fmt: skip


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """At depth 48 Post-LN has the least losses, but one of its seeds diverged.

    The exponent of ‖ΔF‖ grows from step to step, and is larger by 1/2 for Pre-LN.
    """

    def updates(scheme: str, depth: int, seed: int) -> list[float]:
        return [update(depth, t, power=t / 10 + (scheme == "pre_ln") / 2) for t in range(1, 6)]

    make_runs(
        tmp_path / "study", scheme=("deepnorm", "pre_ln", "post_ln"), depth=(6, 48), seed=(0, 1, 2),
        updates=updates, masked=lambda scheme, depth, seed: LOSSES[scheme, depth][seed],
    )  # fmt: skip
    make_run(tmp_path / "study", scheme="post_ln", depth=48, seed=2, state="diverged")
    return tmp_path / "study"


def test_the_margin_is_taken_seed_by_seed(study: Path) -> None:
    first, second = best_of_depths(Runs.below(study))
    pairs = zip(LOSSES["deepnorm", 6], LOSSES["pre_ln", 6], strict=True)
    gaps = [other - own for own, other in pairs]
    half = t.ppf(0.975, 2) * statistics.stdev(gaps) / math.sqrt(3)
    assert (first["leader"], first["second"], first["pairs"]) == ("DeepNorm", "Pre-LN", 3)
    assert first["margin"] == pytest.approx(statistics.fmean(gaps))
    assert first["low"] == pytest.approx(statistics.fmean(gaps) - half)
    assert first["high"] == pytest.approx(statistics.fmean(gaps) + half)
    assert first["below"] == pytest.approx(3.26 - 2.1) and first["verdict"] == "clear"
    # Post-LN lacks a seed at depth 48 and cannot be the best.
    assert (second["leader"], second["second"], second["settings"]) == ("Pre-LN", "DeepNorm", 2)
    assert second["low"] < 0 < second["high"] and second["verdict"].startswith("not clear")


def test_the_page_begins_with_the_finding(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch, "update_vs_depth")
    with without_layout():
        page = Page(report(study))
    text = page.text
    undecided = "At N = 48 it is undecided which of Pre-LN and DeepNorm is better: Pre-LN ends 0.07"
    assert undecided in text
    assert "1 of 18 runs diverged: Post-LN, N = 48 (1 of 3, at step 5)." in text
    law = "The exponent of N in {} of {} is {} ({} to {}) from N = 6 to 48"
    for name, own, pre_ln in (("the first ‖ΔF‖", "0.1", "0.6"), ("‖ΔF‖ at step 5", "0.5", "1.0")):
        for label, power in (("DeepNorm", own), ("Pre-LN", pre_ln)):
            values = [f"{float(power):.2f}"] * 3
            assert law.format(name, label, *values) in text
    assert text.index("Finding") < text.index("Settings and depths compared")
    assert ["6", "DeepNorm", "2.100", "1.160", "Pre-LN", "0.103"] in [r[:6] for r in page.rows]


def test_rates_of_one_scheme_are_no_rivals_of_each_other(tmp_path: Path) -> None:
    losses = {"deepnorm": {0.1: 2.0, 0.2: 2.1}, "pre_ln": {0.1: 2.5, 0.2: 2.4}}
    make_runs(
        tmp_path, scheme=(*losses,), lr=(0.1, 0.2), masked=lambda scheme, lr: losses[scheme][lr]
    )
    (row,) = best_of_depths(Runs.below(tmp_path), ["train.lr"])
    assert (row["leader"], row["second"]) == ("DeepNorm, lr 0.1", "Pre-LN, lr 0.2")
    assert row["settings"] == 2
    assert row["low"] is None and row["verdict"] == "no interval: fewer than three seeds"
    make_run(tmp_path, scheme="rezero", config={"task.name": "markov"})
    assert best_of_depths(Runs.below(tmp_path)) == []  # losses of two tasks are not compared


def test_a_study_in_which_nothing_learns_has_no_best_scheme(tmp_path: Path) -> None:
    make_run(tmp_path, masked=3.2)
    make_run(tmp_path, scheme="pre_ln", masked=3.3)
    sentences = finding_of(Runs.below(tmp_path), (), None)["sentences"]
    assert sentences == [
        "It is undecided which of DeepNorm and Pre-LN is better: DeepNorm ends 0.100 nats lower (1 "
        "pair of seeds, no interval below 3); DeepNorm has learned nothing from context.",
        "No better than a predictor without context: DeepNorm, N = 6 (1 of 1); Pre-LN, N = 6 "
        "(1 of 1).",
        "No run diverged.",
    ]


def test_a_study_of_rates_is_described_at_the_best_rate_of_each_setting(tmp_path: Path) -> None:
    """Not by counts over rates, and without the names of panels."""
    losses = {0.016: 2.9, 0.064: 2.6, 0.256: 3.4}
    make_runs(
        tmp_path, scheme=("deepnorm", "post_ln", "pre_ln"), depth=(6, 12), lr=(*losses,),
        seed=(0, 1), masked=lambda scheme, depth, lr, seed: losses[lr]
        + {"deepnorm": 0.0, "pre_ln": 0.1 - lr, "post_ln": 1.0}[scheme] + 0.01 * seed,
    )  # fmt: skip
    runs = Runs.below(tmp_path)
    assert len(runs.series()) > MOST_LINES  # each scheme has a panel for each step
    sentences = finding_of(runs, (), make_chart("update_vs_depth", tmp_path).data)["sentences"]
    assert sentences[:2] == [
        "At N = 12, DeepNorm learns at its best rate (0.064): 2 of 2 seeds; Pre-LN learns at its "
        "best rate (0.064): 2 of 2 seeds; Post-LN learns at no rate.",
        "At N = 12 it is undecided which of DeepNorm and Pre-LN is better: DeepNorm ends 0.036 "
        "nats lower (2 pairs of seeds, no interval below 3).",
    ]
    starts = [words.split(" is ")[0] for words in sentences if "The exponent" in words]
    assert starts == [
        f"The exponent of N in {update} of {label}"
        for update in ("the first ‖ΔF‖", "‖ΔF‖ at step 5")
        for label in ("DeepNorm", "Post-LN", "Pre-LN")
    ]
    one_rate = finding_of(runs.keep(lambda run: run.get("train.lr") == 0.064), (), None)
    assert "rate" not in " ".join(one_rate["sentences"])
    assert sweep_finding(runs) == [
        "runs that learned from context at the best rate (mean gain in nats over the unigram, "
        "3.260):",
        *(
            f"{n} layers: DeepNorm at its best rate (0.064) 2 of 2 (0.65), Pre-LN at its best rate "
            "(0.064) 2 of 2 (0.62), Post-LN at its best rate (0.064) 0 of 2"
            for n in (6, 12)
        ),
        "At N = 12 it is undecided which of DeepNorm and Pre-LN is better: DeepNorm ends 0.036 "
        "nats lower (2 pairs of seeds, no interval below 3).",
    ]
    of_one = runs.select(["scheme=deepnorm", "lr<0.1"])
    words = "DeepNorm{} at its best rate (0.064, the highest tried)"
    assert words.format(" learns") in finding_of(of_one, (), None)["sentences"][0]
    assert words.format("") + " 2 of 2" in sweep_finding(of_one)[1]


def test_a_sweep_counts_the_seeds_of_each_setting(tmp_path: Path) -> None:
    make_runs(
        tmp_path, seed=(0, 1), config=({"train.optimizer": "sgd"}, {"train.optimizer": "adam"}),
        lr=lambda config, seed: 0.1 if config["train.optimizer"] == "sgd" else 0.01,
        masked=lambda config, seed: 3.3 if config["train.optimizer"] == "sgd" else 2.76,
    )  # fmt: skip
    assert sweep_finding(find_runs(tmp_path))[1:] == [
        "6 layers: optimizer adam 2 of 2 (0.50), optimizer sgd 0 of 2",
        "It is undecided which of optimizer adam and optimizer sgd is better: optimizer adam ends "
        "0.54 nats lower (2 pairs of seeds, no interval below 3).",
    ]


def test_a_short_key_chooses_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)
    make_runs(tmp_path, lr=(0.1, 0.2), masked=lambda lr: 2.0 + lr)
    for key in ("lr", "train.lr"):
        text = Page(report(tmp_path, best=[key])).text
        assert "it is undecided which of" not in text  # one scheme, one chosen rate


def test_a_diverged_run_is_a_result_and_not_an_undone_one(tmp_path: Path) -> None:
    make_run(tmp_path, masked=2.5)
    make_run(tmp_path, scheme="post_ln", state="diverged")
    make_run(tmp_path, scheme="pre_ln", state="interrupted")
    text = Page(report(tmp_path)).text
    assert "1 not done" in text and "interrupted, not at its end" in text
