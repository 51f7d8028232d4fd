"""The 95 % intervals of `compare` and `report`, against tabulated quantiles of Student's t."""

import json
import math
import statistics
from pathlib import Path

import pytest
from helpers.command_line import typed
from helpers.plot_runs import make_run, make_runs
from helpers.report_pages import Page, draw_only, row_of

from deepstack.reports import compare, report

QUANTILE = 4.303  # two-sided 95 % quantile of Student's t for three values, as tables print it


def loss_of(scheme: str, seed: int) -> float:
    """Losses whose paired differences are 1 + 0.1, 1 + 0.4, 1 + 0.9, …"""
    return 2.0 + 0.3 * (seed % 4) + (1.0 + 0.1 * (seed + 1) ** 2) * (scheme == "post_ln")


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    make_runs(tmp_path, scheme=("deepnorm", "post_ln"), masked=3.0)
    make_run(tmp_path, scheme="post_ln", seed=1, state="diverged", masked=9.0)
    row = row_of(compare(tmp_path, "deepnorm"), setting="Post-LN")
    assert (row.seeds, row.n, row.pairs) == (2, 1, 1)
    assert all(map(math.isnan, (row.val_low, row.val_high, row.diff_low, row.diff_high)))


def test_intervals_are_student_s_t_in_tables_and_on_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_runs(tmp_path, scheme=("deepnorm", "post_ln"), seed=(0, 1, 2), masked=loss_of)
    row = row_of(compare(tmp_path, "deepnorm"), setting="Post-LN")
    losses = [loss_of("post_ln", seed) for seed in range(3)]
    differences = [loss - loss_of("deepnorm", seed) for seed, loss in enumerate(losses)]
    for values, low, high in (
        (losses, row.val_low, row.val_high),
        (differences, row.diff_low, row.diff_high),
    ):
        mean = statistics.fmean(values)
        half = QUANTILE * statistics.stdev(values) / math.sqrt(3)
        assert (low, high) == pytest.approx((mean - half, mean + half), abs=1e-3 * half)
    words = "compare", tmp_path, "--against", "deepnorm"
    base, post_ln = json.loads(typed(*words, "--json").stdout)
    assert {k: value for k, value in post_ln.items() if value is not None} == row.dropna().to_dict()
    # The baseline has no difference, so it has no interval of one.
    assert (base["diff_low"], base["diff_high"], base["pairs"], base["n"]) == (None, None, 0, 3)
    names = {"val_low", "val_high", "n", "diff_low", "diff_high", "pairs"}
    others = {"setting", "depth", "seeds", "outcome", "val_loss", "val_sd", "unigram", "difference"}
    assert names | others | {"se", "update_first", "update_last", "step_ms"} <= set(post_ln)
    assert names <= set(typed(*words).stdout.strip().splitlines()[0].split())

    draw_only(monkeypatch)
    page = Page(report(tmp_path, against="deepnorm"))
    heads = next(each for each in page.rows if each[0] == "setting")
    shown = next(each for each in page.rows if each[0] == "Post-LN")
    for name, count, interval in (
        ("validation loss", "n", [f"{row.val_low:.3f}", f"{row.val_high:.3f}"]),
        ("difference", "pairs", [f"{row.diff_low:+.3f}", f"{row.diff_high:+.3f}"]),
    ):
        at = heads.index(name) + 2
        assert heads[at : at + 3] == ["95 % from", "to", count]
        assert shown[at : at + 3] == [*interval, "3"]
    assert "95 % interval of the mean (Student's t)" in page.text
    assert "accounts for this choice" not in page.text
