"""Who trains, stalls and diverges: the criterion, and the two maps that are drawn by it."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from helpers import ROOT
from helpers.command_line import typed
from helpers.configs import config_with
from helpers.plot_runs import caption, make_chart, make_run, rows, words
from helpers.report_pages import draw_only
from scipy.stats import t

import deepstack
from deepstack.cli.finding import run_finding
from deepstack.records import EVALS_COLUMNS, Run
from deepstack.runs.intervals import student
from deepstack.runs.outcomes import CLEAR, FAR, LEARNT, margin, outcome, result_of
from deepstack.runs.statistics import context_free_loss, has_mask_loss, loss_column

UNIGRAM = 2.5
# How far from the unigram a run of each outcome ends.
ENDS = {"trained": -0.4, "stalled": 0.02, "above": 0.9, "diverged": 0.9}


def run_with(root: Path, result: str = "trained", **settings: Any) -> Run:
    """A finished run that trained, stalled or diverged."""
    state = "diverged" if result == "diverged" else "done"
    run = Run(make_run(root, state=state, **settings))
    return evaluated(run, UNIGRAM + ENDS[result], UNIGRAM)


def evaluated(run: Run, masked: float | None, unigram: float | None, loss: float = 2.0) -> Run:
    """The run with other validation losses: far above the unigram at step 0, these at its end."""
    run.folder.evals_path.unlink()
    with run.folder.log("evals", (*EVALS_COLUMNS, "unigram_loss")) as log:
        log.write({"step": 0, "loss": 9.0, "loss_masked": 9.0, "unigram_loss": unigram})
        if run.state == "done":
            log.write({"step": 5, "loss": loss, "loss_masked": masked, "unigram_loss": unigram})
    return Run(run.path)


# --- the criterion -------------------------------------------------------------------------


def test_the_outcome_of_earlier_runs_depends_on_the_distance_from_the_unigram(
    tmp_path: Path,
) -> None:
    """They have no standard error."""
    run = Run(make_run(tmp_path))
    shares = {-1.01: "trained", -0.99: "stalled", 0.99: "stalled", 1.01: "above"}
    for share, expected in shares.items():
        end = evaluated(run, UNIGRAM + share * FAR, UNIGRAM)
        assert margin(end) == pytest.approx(share * FAR) and outcome(end) == expected
    diverged = Run(make_run(tmp_path, state="diverged"))  # whatever its losses
    assert margin(diverged) is not None and outcome(diverged) == "diverged"
    assert outcome(Run(make_run(tmp_path, state="interrupted"))) is None


def test_the_distances_are_those_that_the_pages_state() -> None:
    """0.02 nats below chance and 0.1 above it, as the docstring of the rule explains."""
    assert (CLEAR, FAR) == (0.02, 0.1)
    pages = {"charts.md": 2, "tutorials/reading_a_chart.md": 1}
    for page, times in pages.items():
        text = " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())
        assert text.count(f"more than {CLEAR:g} nats") + text.count(f"for {CLEAR:g} nats") == times
        assert f"more than {FAR:g} nats above" in text


@pytest.mark.parametrize(
    ("difference", "error", "start", "expected"),
    [
        (-CLEAR - 0.202, 0.1, 9.0, "trained"),  # t = 2.0096 with 49 degrees of freedom
        (-CLEAR - 0.200, 0.1, 9.0, "stalled"),
        (-CLEAR - 0.001, 0.0, 9.0, "trained"),
        (-0.3, 0.01, UNIGRAM - 0.3 + CLEAR - 0.001, "stalled"),  # hardly below its own start
        (-0.3, 0.01, UNIGRAM - 0.3 + CLEAR + 0.001, "trained"),
        (FAR + 0.202, 0.1, 9.0, "above"),
        (FAR + 0.200, 0.1, 9.0, "stalled"),
    ],
)
def test_a_run_has_learnt_if_its_interval_over_blocks_lies_below_chance(
    difference: float, error: float, start: float, expected: str, tmp_path: Path
) -> None:
    run = Run(make_run(tmp_path))
    loss = UNIGRAM + difference
    ends = {"step": 5, "loss": loss, "loss_masked": loss, "unigram_loss": UNIGRAM}
    run.folder.evals_path.unlink()
    with run.folder.log("evals", (*EVALS_COLUMNS, "unigram_loss", "margin_se")) as log:
        log.write(ends | {"step": 0, "loss": start, "loss_masked": start})
        log.write(ends | {"margin_se": error})
    run.folder.write_meta(run.meta | {"validation": {"blocks": 50}})
    assert outcome(Run(run.path)) == expected
    # A run that starts with trained weights need not fall any further.
    run.folder.write_meta(run.meta | {"validation": {"blocks": 50}, "start": {"run": "other"}})
    end = result_of(Run(run.path))
    assert end.start is None and end.error == pytest.approx(error)
    assert end.outcome == ("trained" if difference == -0.3 else expected)


@pytest.mark.parametrize(("blocks", "has_one"), [(2, False), (3, True)])
def test_two_blocks_of_a_validation_set_give_no_interval(
    blocks: int, has_one: bool, tmp_path: Path
) -> None:
    run = Run(make_run(tmp_path))
    loss = UNIGRAM - 0.5
    ends = {"step": 5, "loss": loss, "loss_masked": loss, "unigram_loss": UNIGRAM}
    run.folder.evals_path.unlink()
    with run.folder.log("evals", (*EVALS_COLUMNS, "unigram_loss", "margin_se")) as log:
        log.write(ends | {"step": 0, "loss": 9.0, "loss_masked": 9.0})
        log.write(ends | {"margin_se": 0.001})
    run.folder.write_meta(run.meta | {"validation": {"blocks": blocks}})
    end = result_of(Run(run.path))
    assert (end.half_width is not None) is has_one and end.outcome == "trained"


@pytest.mark.parametrize("intervals", [1, 3, 20])
def test_the_quantiles_of_many_degrees_of_freedom_are_students(intervals: int) -> None:
    for count in (100, 101, 128, 1000, 8192):
        expected = t.ppf(1 - 0.025 / intervals, count - 1)
        assert student(count, intervals) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "error", "start", "sentence"),
    [
        (2.2, 0.05, 9.0, "has learned from context: 0.30 ± 0.05 nats below the unigram (2.20 ag"),
        (2.42, 0.05, 9.0, "has not clearly learned from context: 0.08 ± 0.05 nats below the uni"),
        (2.49, 0.02, 9.0, "has learned nothing from context: it ends level with the unigram (2."),
        (2.1, 0.45, 9.0, "may have learned from context: it ends 0.40 ± 0.45 nats below the unig"),
        (2.6, 0.45, 9.0, "may have learned from context: it ends 0.10 ± 0.45 nats above the unig"),
        (2.53, 0.01, 9.0, "has learned nothing from context: it ends level with the unigram (2."),
        (2.9, 0.01, 9.0, "ends 0.40 ± 0.01 nats above the unigram (2.90 against 2.50 nats)."),
        (2.2, 0.05, 2.21, "has learned nothing: its loss ends as it began (2.20 against 2.50 na"),
    ],
)
def test_a_run_is_described_by_its_outcome(
    loss: float, error: float, start: float, sentence: str, tmp_path: Path
) -> None:
    run = Run(make_run(tmp_path))
    ends = {"step": 5, "loss": loss, "loss_masked": loss, "unigram_loss": UNIGRAM}
    run.folder.evals_path.unlink()
    with run.folder.log("evals", (*EVALS_COLUMNS, "unigram_loss", "margin_se")) as log:
        log.write(ends | {"step": 0, "loss": start, "loss_masked": start})
        log.write(ends | {"margin_se": error})
    run.folder.write_meta(run.meta | {"validation": {"blocks": 500}})
    assert (run_finding(Run(run.path)) or "").startswith(f"DeepNorm with 6 layers {sentence}")


def test_an_untrained_stack_with_a_tied_head_has_not_learnt(tmp_path: Path) -> None:
    """It repeats the token that it reads, which is the answer of `copy`."""
    settings = {
        "model.head": "tied", "model.scheme": "pre_ln", "model.depth": 2, "model.d_model": 16,
        "task.name": "copy", "task.seq_len": 8,
    }  # fmt: skip
    for steps, rate in ((0, 1e-3), (2, 1e-30)):
        config = config_with(settings, train__steps=steps, train__lr=rate)
        end = result_of(deepstack.train(config, out=tmp_path))
        assert end.margin is not None and end.half_width is not None
        assert end.margin + end.half_width < -CLEAR and end.outcome == "stalled"


def test_the_unigram_counts_the_same_positions(tmp_path: Path) -> None:
    stated = {"unigram_entropy": 9.0, "context_free_entropy": 7.0}
    run = Run(make_run(tmp_path, references=stated))
    assert margin(evaluated(run, 2.4, UNIGRAM)) == pytest.approx(2.4 - UNIGRAM)
    # The reference of an older run, and of a run without [MASK].
    assert margin(evaluated(run, 2.4, None)) == pytest.approx(2.4 - 9.0)
    assert margin(evaluated(run, None, None, loss=2.2)) == pytest.approx(2.2 - 7.0)
    # Where all predicted positions show [MASK], both losses have the same positions.
    both = evaluated(run, 2.4, UNIGRAM, loss=2.4)
    assert context_free_loss(both, "loss") == context_free_loss(both, "loss_masked") == UNIGRAM
    assert context_free_loss(evaluated(run, 2.4, UNIGRAM), "loss") == 7.0
    assert context_free_loss(evaluated(run, 2.4, 0.0), "loss_masked") == 0.0  # a text of one byte
    uniform = Run(make_run(tmp_path, references={"uniform_entropy": 3.0}))
    assert margin(evaluated(uniform, 2.4, None)) == pytest.approx(2.4 - 3.0)
    assert margin(evaluated(uniform, None, None, loss=2.2)) == pytest.approx(2.2 - 3.0)
    unknown = Run(make_run(tmp_path, references={}))
    assert margin(evaluated(unknown, None, None)) is None and outcome(unknown) is None


# --- outcomes ------------------------------------------------------------------------------


def test_a_cell_counts_its_seeds(tmp_path: Path) -> None:
    """Two schemes, two depths, two learning rates, three seeds; Post-LN fails with depth."""
    slow, fast = ("trained", "stalled", "trained"), ("above", "diverged", "diverged")
    for lr, results in ((2e-3, slow), (1e-2, fast)):
        for seed, result in enumerate(results):
            for scheme, depth in (("deepnorm", 6), ("deepnorm", 48), ("post_ln", 6)):
                run_with(tmp_path / "study", scheme=scheme, depth=depth, lr=lr, seed=seed)
            run_with(tmp_path / "study", result, scheme="post_ln", depth=48, lr=lr, seed=seed)
    make_run(tmp_path / "study", scheme="rezero", state="interrupted")
    chart = make_chart("outcomes", tmp_path)
    assert f"learnt: {LEARNT}; worse" in chart.caption
    assert "left out: 1 run without an outcome" in caption(chart)
    assert "ReZero" not in set(chart.data["series"])
    (axes,) = chart.figure.axes
    names = [label.get_text().replace("\n", " ") for label in axes.get_yticklabels()]
    assert names[0].startswith("DeepNorm") and names[-1] == "Post-LN, lr\u00a00.01"  # best on top

    def counts(series: str, depth: int) -> dict[str, int]:
        found = rows(chart, series=series, x=depth)
        return dict(zip(found["kind"], found["n"], strict=True))

    assert counts("DeepNorm, lr\u00a00.002", 48) == {"trained": 3}
    assert counts("Post-LN, lr\u00a00.002", 48) == {"trained": 2, "stalled": 1}
    assert counts("Post-LN, lr\u00a00.01", 48) == {"above": 1, "diverged": 2}
    table = make_chart("outcomes", tmp_path, panels="lr").data
    assert list(dict.fromkeys(table["panel"])) == ["lr\u00a00.002", "lr\u00a00.01"]  # by size
    assert set(table["series"]) == {"DeepNorm", "Post-LN"}
    (stalled,) = rows(chart, kind="stalled")["value"]
    assert stalled == pytest.approx(ENDS["stalled"])
    # A diverged run has no last loss, only one from before it diverged.
    assert rows(chart, kind="diverged")["value"].isna().all()


def test_options_of_a_scheme_are_rows_and_dependent_rates_no_panels(tmp_path: Path) -> None:
    for seed, power in enumerate((0.25, 0.5)):
        options = {"model.scheme_options.power": power}
        run_with(tmp_path / "options", scheme="deepnorm", seed=seed, config=options)
        run_with(tmp_path / "options", scheme="post_ln", seed=seed)
        run_with(tmp_path / "rates", scheme="deepnorm", depth=6 + seed, lr=1e-3)
        run_with(tmp_path / "rates", scheme="post_ln", depth=6 + seed, lr=1e-4)
    copy = tmp_path / "options" / "copy"  # a seed counts once
    shutil.copytree(next(copy.parent.glob("post_ln*")), copy)
    table = make_chart("outcomes", tmp_path / "options").data
    assert dict(zip(table["series"], table["n"], strict=True)) == {
        "Post-LN": 2, "DeepNorm, power\u00a00.25": 1, "DeepNorm, power\u00a00.5": 1
    }  # fmt: skip
    assert "panel" not in table and "panel" not in make_chart("outcomes", tmp_path / "rates").data


# --- frontier ------------------------------------------------------------------------------


def test_the_frontier_is_the_largest_rate_at_which_all_seeds_train(tmp_path: Path) -> None:
    results = (("trained", "above"), ("trained",) * 2, ("trained", "stalled"), ("diverged",) * 2)
    for lr, of_seeds in zip((1e-3, 3e-3, 1e-2, 3e-2), results, strict=True):
        for seed, result in enumerate(of_seeds):
            run_with(tmp_path, result, scheme="deepnorm", depth=6, lr=lr, seed=seed)
            run_with(tmp_path, "stalled", scheme="post_ln", depth=6, lr=lr, seed=seed)
            run_with(tmp_path, scheme="rezero", depth=48, lr=lr, seed=seed)
    chart = make_chart("frontier", tmp_path)
    found = rows(chart, kind="frontier").set_index("panel")
    assert found["y"].dropna().to_dict() == pytest.approx({"DeepNorm": 3e-3, "ReZero": 3e-2})
    # Nothing trained is no rate; the largest that was tried is a lower bound.
    assert found["mark"].dropna().to_dict() == {"Post-LN": "none", "ReZero": "at least"}
    column = rows(chart, panel="DeepNorm", y=1e-3)
    assert dict(zip(column["kind"], column["n"], strict=True)) == {"trained": 1, "above": 1}


def test_a_rate_that_was_not_tried_leaves_a_gap_and_moves_no_line(tmp_path: Path) -> None:
    for depth, lr in ((6, 1e-3), (6, 1e-2), (48, 1e-3), (48, 3e-3)):
        run_with(tmp_path, depth=depth, lr=lr)
    chart = make_chart("frontier", tmp_path)
    best = rows(chart, kind="frontier")
    assert dict(zip(best["x"], best["y"], strict=True)) == {6: 1e-2, 48: 3e-3}
    assert len(chart.figure.axes[0].patches) == 4


# --- words ---------------------------------------------------------------------------------


def test_readers_see_plain_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = pytest.importorskip("deepstack.tools.report.page").report
    draw_only(monkeypatch)
    for depth, result in zip((6, 18, 48, 96), ENDS, strict=True):
        run_with(tmp_path / "study", result, depth=depth)
    chart = make_chart("outcomes", tmp_path)
    assert set(chart.data["kind"]) == set(ENDS)
    assert {"learnt", "at chance", "worse", "diverged"} <= set(words(chart))
    assert not {"trained", "stalled", "above"} & set(words(chart))
    report(tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"\d (trained|stalled|above)\b", page)
    printed = typed("compare", tmp_path).stdout
    for word in ("1 learnt", "1 at chance", "1 worse", "1 diverged"):
        assert word in printed and word in page
    entries = json.loads(typed("compare", tmp_path, "--json").stdout)
    assert [row["outcome"] for row in entries] == [f"1 {result}" for result in ENDS]
    assert "‖ΔF‖" in printed and {row["update_measure"] for row in entries} == {"‖ΔF‖"}


def test_losses_on_hidden_tokens_count_where_all_runs_have_them() -> None:
    runs: Any = [
        SimpleNamespace(evals=pd.DataFrame({"loss_masked": [1.0], "loss": [1.0]})),
        SimpleNamespace(evals=pd.DataFrame({"loss": [1.0]})),
    ]
    assert has_mask_loss(runs[:1]) and not has_mask_loss(runs)
    assert [loss_column(runs[:1]), loss_column(runs)] == ["loss_masked", "loss"]


def test_the_width_of_a_box_is_the_share_of_its_seeds(tmp_path: Path) -> None:
    for seed, loss in enumerate((2.5, 2.6, 3.3)):
        for scheme in ("deepnorm", "post_ln"):
            make_run(tmp_path, scheme=scheme, seed=seed, masked=loss)
    (axes,) = make_chart("outcomes", tmp_path).figure.axes
    widths = [patch.get_width() for patch in axes.patches]
    assert widths[0] == pytest.approx(2 * widths[1]) and len(widths) == 4
