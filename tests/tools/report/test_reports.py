"""`compare` and `report`: their arithmetic against slow copies, and a page that holds all of it."""

import base64
import hashlib
import io
import json
import math
import re
import shutil
import statistics
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import typed
from helpers.extensions import needs
from helpers.plot_runs import make_chart, make_run, make_runs, update, without_layout
from helpers.record_runs import end
from helpers.report_pages import Page, draw_only

import deepstack
import deepstack.tools.report.page as page_module
from deepstack.base.errors import BrokenChartError, ConfigError, ResourceError
from deepstack.plots import CHARTS, Chart, Table, chart
from deepstack.plots.style import scheme_style
from deepstack.records import Run, RunFolder, problems
from deepstack.runs import Runs
from deepstack.runs.comparison import compare
from deepstack.tools.report.figures import describe_figure
from deepstack.tools.report.finding import best_of_depths
from deepstack.tools.report.page import report

SCHEMES, SETTINGS = ("deepnorm", "post_ln"), ("DeepNorm", "Post-LN")
QUANTILE = 4.303  # two-sided 95 % quantile of Student's t for three values, as tables print it
LOSS = {
    (scheme, depth, seed): 2.0 + 0.1 * seed + (0.4 if scheme == "post_ln" else 0.01 * seed) + depth
    for scheme in SCHEMES
    for depth in (1, 2)
    for seed in (0, 1, 2)
}


@pytest.fixture(autouse=True)
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_only(monkeypatch)


def rows_of(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a comparison by setting and depth."""
    return table.set_index(["setting", "depth"])


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two schemes, two depths and three seeds, for reading only."""
    root = tmp_path_factory.mktemp("results") / "mine"
    make_runs(
        root, scheme=SCHEMES, depth=(1, 2), seed=(0, 1, 2),
        masked=lambda scheme, depth, seed: LOSS[scheme, depth, seed],
    )  # fmt: skip
    return root


# --- compare -------------------------------------------------------------------------------


def test_a_row_is_the_mean_and_the_spread_of_its_seeds(study: Path) -> None:
    table = compare(study)
    assert list(zip(table.setting, table.depth, strict=True)) == [
        ("DeepNorm", 1), ("DeepNorm", 2), ("Post-LN", 1), ("Post-LN", 2)
    ]  # fmt: skip
    for scheme, setting in zip(SCHEMES, SETTINGS, strict=True):
        row = rows_of(table).loc[setting, 2]
        losses = [LOSS[scheme, 2, seed] for seed in range(3)]
        assert row.val_loss == pytest.approx(statistics.fmean(losses))
        assert row.val_sd == pytest.approx(statistics.stdev(losses))
        half = QUANTILE * row.val_sd / math.sqrt(3)
        ends = (row.val_loss - half, row.val_loss + half)
        assert (row.val_low, row.val_high) == pytest.approx(ends, abs=1e-3 * half)
        assert (row.seeds, row.n, row.outcome, row.unigram) == (3, 3, "3 above", 3.26)
        assert row.update_first == pytest.approx(update(2, 1))
        assert row.update_last == pytest.approx(update(2, 5))
    assert "difference" not in table
    shown = typed("compare", study, "--markdown")
    assert shown.stdout.startswith("| setting | depth |") and len(shown.stdout.splitlines()) == 6


@pytest.mark.parametrize("word", ["train.lr=2e-3", "train.lr=0.002", "lr=.002"])
def test_a_baseline_is_found_by_its_value(tmp_path: Path, word: str) -> None:
    make_runs(tmp_path / "s", lr=(1e-3, 2e-3), seed=(0, 1, 2))
    table = compare(tmp_path / "s", against=word)
    assert table["pairs"].tolist() == [3, 0]  # the baseline has no pairs
    with pytest.raises(ConfigError, match="against: "):
        compare(tmp_path / "s", against="train.lr=3e-3")


def test_only_what_is_done_has_a_loss(tmp_path: Path) -> None:
    for seed, state in enumerate(("done", "diverged", "failed", "interrupted")):
        make_run(tmp_path / "states", seed=seed, state=state, masked=1.0 + seed)
    row = compare(tmp_path / "states").iloc[0]
    assert (row.seeds, row.n, row.val_loss) == (4, 1, 1.0)
    assert row[["val_sd", "val_low", "val_high"]].isna().all()
    wanted = ["1 diverged", "1 failed", "1 interrupted", "1 trained"]
    assert sorted(row.outcome.split(", ")) == wanted
    # Without [MASK] the floor is the best without context, not the unigram of [MASK] positions.
    make_run(tmp_path / "plain", masked=math.nan)
    row = compare(tmp_path / "plain").iloc[0]
    assert (row.val_loss, row.unigram, row.outcome) == (2.0, 2.98, "1 trained")


@pytest.mark.parametrize("against", ["post_ln", "model.scheme=post_ln"])
def test_a_difference_is_taken_seed_by_seed(study: Path, against: str) -> None:
    table = compare(study, against)
    for depth in (1, 2):
        found = [LOSS["deepnorm", depth, s] - LOSS["post_ln", depth, s] for s in range(3)]
        row = rows_of(table).loc["DeepNorm", depth]
        assert row.difference == pytest.approx(statistics.fmean(found))
        assert row.se == pytest.approx(statistics.stdev(found) / math.sqrt(3))
        assert row.se < row.val_sd / 5  # what seeds have in common is out of it
        half = QUANTILE * row.se
        ends = (row.difference - half, row.difference + half)
        assert (row.diff_low, row.diff_high) == pytest.approx(ends, abs=1e-3 * half)
        assert row.pairs == 3
        own = rows_of(table).loc["Post-LN", depth]
        assert own.pairs == 0 and own[["difference", "diff_low", "diff_high"]].isna().all()
    words = "compare", study, "--against", against
    first, *_ = json.loads(typed(*words, "--json").stdout)
    known = {name: value for name, value in first.items() if value is not None}
    assert known == table.iloc[0].dropna().to_dict() and "step_ms" in first
    names = {"val_low", "val_high", "n", "diff_low", "diff_high", "pairs"}
    assert names <= set(typed(*words).stdout.strip().splitlines()[0].split())


def test_pairs_agree_in_all_other_settings(tmp_path: Path) -> None:
    """Two schemes at two rates: each is compared at its own rate, and rates within a scheme."""
    make_runs(tmp_path, lr=(0.1, 0.2), masked=lambda lr: 10 * lr)
    make_run(tmp_path, scheme="post_ln", lr=0.1, masked=4.0)
    by_scheme = compare(tmp_path, "post_ln").set_index("setting")
    assert by_scheme.difference["DeepNorm, lr 0.1"] == pytest.approx(-3.0)
    assert by_scheme.pairs["DeepNorm, lr 0.2"] == 0
    by_rate = compare(tmp_path, "train.lr=0.1").set_index("setting")
    assert by_rate.difference["DeepNorm, lr 0.2"] == pytest.approx(1.0)
    assert by_rate.pairs["Post-LN, lr 0.1"] == 0
    # A rate that was chosen for each scheme, or an option that only one has, parts no pair.
    make_run(tmp_path / "own", scheme="deepnorm", lr=0.1, masked=1.0)
    start = {"model.scheme_options.start": 0.5}
    make_run(tmp_path / "own", scheme="post_ln", lr=0.2, masked=4.0, config=start)
    own = compare(tmp_path / "own", "post_ln").set_index("pairs")
    assert own.difference[1] == pytest.approx(-3.0)


# --- report --------------------------------------------------------------------------------


def content(address: str) -> bytes:
    kind, _, data = address.partition(";base64,")
    assert kind in ("data:image/svg+xml", "data:text/csv")
    return base64.b64decode(data, validate=True)


@pytest.fixture(scope="module")
def whole(study: Path) -> Path:
    """A page with every chart."""
    with without_layout():
        return report(study, against="post_ln")


def test_a_page_holds_every_table_and_chart(study: Path, whole: Path) -> None:
    assert whole.parts[-2:] == ("mine", "report.html")
    page = Page(whole)
    assert page.open == []
    head = next(row for row in page.rows if row[0] == "setting")
    cells = next(row for row in page.rows if row[:2] == ["DeepNorm", "2"])
    row = rows_of(compare(study, "post_ln")).loc["DeepNorm", 2]
    for name, count, sign, values in (
        ("validation loss", "n", "", (row.val_loss, row.val_low, row.val_high)),
        ("difference", "pairs", "+", (row.difference, row.diff_low, row.diff_high)),
    ):
        at = head.index(name)
        assert head[at + 2 : at + 5] == ["95 % from", "to", count] and cells[at + 4] == "3"
        assert [cells[at], *cells[at + 2 : at + 4]] == [f"{value:{sign}.3f}" for value in values]
    assert "95 % interval of the mean (Student's t)" in page.text
    assert "accounts for this choice" not in page.text
    drawn = [f["id"].partition("-")[2] for f in page.all("figure")]
    assert drawn[:2] == ["final_loss_vs_depth", "outcomes"] and "update_vs_step" in drawn
    left_out = set(re.findall(r"(\w+) is not drawn: ", page.text))
    assert left_out | set(drawn) == set(CHARTS) and not left_out & set(drawn)
    tables = [a["href"] for a in page.all("a") if "download" in a]
    assert len(page.all("img")) == len(tables) == len(drawn)
    for image in page.all("img"):
        assert b"<svg" in content(image["src"]) and image["alt"] and int(image["width"]) > 300
    numbers = pd.read_csv(io.BytesIO(content(tables[0])))
    assert {"DeepNorm", "Post-LN"} <= set(numbers["series"])
    anchors = {attributes.get("id") for _, attributes in page.tags}
    links = {a["href"] for a in page.all("a") if "download" not in a}
    inner = {link for link in links if link.startswith("#")}
    assert inner and {link[1:] for link in inner} <= anchors
    assert {unquote(link) for link in links - inner} == {
        path.name for path in study.iterdir() if RunFolder(path).exists()
    }
    assert "d_model: 64" in page.text and "scheme:" not in page.text.split("d_model")[0][-80:]


def test_the_lowest_loss_of_each_depth_is_bold(tmp_path: Path) -> None:
    """A single loss of a depth is not, and neither is a run that diverged."""
    losses = {"deepnorm": (2.0, 2.6), "post_ln": (2.5, 2.1)}
    make_runs(
        tmp_path, scheme=SCHEMES, depth=(1, 2),
        masked=lambda scheme, depth: losses[scheme][depth - 1],
    )  # fmt: skip
    make_run(tmp_path, depth=3, masked=2.4)
    make_run(tmp_path, scheme="rezero", depth=1, masked=1.0, state="diverged")
    text = report(tmp_path).read_text("utf-8")
    assert re.findall(r"number best\"[^>]*>(.*?)<", text) == ["2.000", "2.100"]
    assert re.search(r"\.best \{ font-weight: 700; \}", text) and "Bold: lowest mean at" in text


@needs("sharpness")
def test_lines_that_coincide_keep_their_colours(tmp_path: Path) -> None:
    make_runs(tmp_path, scheme=SCHEMES, layers=np.ones((5, 6)))
    for name in ("update_vs_step", "sharpness_vs_step"):
        (panel,) = describe_figure(make_chart(name, tmp_path))["panels"]
        styles = [(scheme_style(scheme)["color"].lower(), "", False, False) for scheme in SCHEMES]
        assert list(panel["styles"]["line"].values()) == styles and panel["kinds"] == ["line"]


def test_a_page_fetches_nothing(whole: Path) -> None:
    once, page = whole.read_bytes(), Page(whole)
    assert page.all("script") == [{"type": "application/json", "id": "panels"}, {}]
    assert not page.all("link")
    assert all(i["src"].startswith("data:") for i in page.all("img"))
    policy = next(m["content"] for m in page.all("meta") if "http-equiv" in m)
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for tag in (b"script", b"style"):  # the last element of the kind: the script follows its data
        content_of = once.rpartition(b"<%s>" % tag)[2].partition(b"</%s>" % tag)[0]
        digest = base64.b64encode(hashlib.sha256(content_of).digest()).decode()
        assert f"{tag.decode()}-src 'sha256-{digest}'" in policy
    for address in re.findall(rb"(?:src|href|url)[=(]\"?([^\"> ]{1,30})", once):
        assert address.startswith((b"data:", b"#", b"deepnorm-", b"post_ln-"))


def test_the_library_that_draws_charts_is_unchanged_and_named_with_its_licence(whole: Path) -> None:
    folder = Path(page_module.__file__).parent / "uplot"
    sums = dict(line.split()[::-1] for line in (folder / "SHA256SUMS").read_text().splitlines())
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "SHA256SUMS"}
    assert sums == {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    text = whole.read_bytes()
    assert all(data.strip() in text for data in files.values()) and len(files) == 3


def test_names_and_messages_of_a_folder_are_text_in_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and messages of a folder that came from elsewhere."""
    draw_only(monkeypatch, "loss_vs_step")
    evil = "<script>alert(1)</script>\"'&{{ 7*7 }}"
    path = make_run(tmp_path / "a&b <i>", state="failed", config={"task.name": evil})
    folder = RunFolder(path)
    folder.write_columns(Run(path).columns | {"scheme": {"label": evil}})
    folder.write_meta({"environment": {evil: evil}, "git": {"commit": evil}, "command": evil})
    page = Page(report(tmp_path))
    assert len(page.all("script")) == 2 and not page.all("i") and page.open == []
    assert "<script>alert(1)" in page.text and "{{ 7*7 }}" in page.text


def test_runs_that_did_not_end_are_named(tmp_path: Path) -> None:
    _, broken = make_runs(tmp_path, seed=(0, 2))
    make_run(tmp_path, seed=1, state="interrupted")
    (broken / "status.json").write_text("{")
    messages: list[str] = []
    page = Page(report(tmp_path, tmp_path / "deep" / "page.html", say=messages.append))
    assert "2 runs: 1 done, 1 interrupted" in page.text
    assert "interrupted, not at its end" in page.text and broken.name in page.text
    assert any(broken.name in line for line in messages)


def test_a_page_of_one_run_and_of_several_studies(tmp_path: Path) -> None:
    run = end(RunFolder(make_run(tmp_path / "one")), 5).path
    make_run(tmp_path / "two", scheme="post_ln")
    assert report(run) == run / "report.html" and problems(RunFolder(run)) == []
    assert deepstack.report(tmp_path) == tmp_path / "report.html"
    page = Page(tmp_path / "report.html")
    assert [row[0] for row in page.rows if row[0] in SETTINGS] == list(SETTINGS)
    assert len(page.all("section")) == 2
    several = [tmp_path / "one", tmp_path / "two"]
    with pytest.raises(ConfigError, match="--to FILE"):
        report(several)
    assert len(Page(report(several, tmp_path / "both.html")).all("section")) == 1


def test_a_broken_chart_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @chart("broken_one")
    def broken_one(runs: list[Run], *, options: Any) -> Chart:
        """It fails."""
        return Chart(Table().nothing, None, "")  # type: ignore

    draw_only(monkeypatch, "broken_one", "loss_vs_step", "update_vs_step")
    make_run(tmp_path)
    with pytest.raises(BrokenChartError, match="broken_one is not drawn") as error:
        report(tmp_path)
    assert error.value.written == [tmp_path / "report.html"]
    page = Page(tmp_path / "report.html")
    assert "broken_one is not drawn" in page.text and len(page.all("img")) == 2
    once = (tmp_path / "report.html").read_bytes()
    found = typed("report", tmp_path)
    assert found.exit_code == 1 and found.stdout.strip() == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_bytes() == once


def test_unreadable_runs_and_a_file_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "steps.csv").write_text("a,b\n1,2\n")
    for call in (report, compare):
        with pytest.raises(ResourceError, match=run.name):
            call(tmp_path)
    (tmp_path / "file").touch()
    make_run(tmp_path / "study")
    with pytest.raises(ResourceError, match="--to"):
        report(tmp_path / "study", tmp_path / "file" / "page.html")


def make_rates(root: Path) -> Path:
    """Two schemes whose best rates differ; at the greatest one seed of Post-LN diverged."""
    losses = {"deepnorm": {0.1: 3.0, 0.2: 2.0, 0.4: 2.5}, "post_ln": {0.1: 4.0, 0.2: 4.5, 0.4: 1.0}}
    make_runs(
        root, scheme=SCHEMES, lr=(0.1, 0.2, 0.4), seed=(0, 1),
        masked=lambda scheme, lr, seed: losses[scheme][lr] + 0.1 * seed,
    )  # fmt: skip
    make_run(root, scheme="post_ln", lr=0.4, seed=1, state="diverged")
    return root


def test_the_best_rate_is_the_one_at_which_most_seeds_learn(tmp_path: Path) -> None:
    table = compare(make_rates(tmp_path), "post_ln", ["train.lr"])
    assert table[["setting", "train.lr", "edge"]].to_numpy().tolist() == [
        ["DeepNorm", 0.2, ""], ["Post-LN", 0.4, "highest"]
    ]  # fmt: skip
    assert table["outcome"].tolist() == ["2 trained", "1 trained, 1 diverged"]
    assert table["val_loss"].tolist() == pytest.approx([2.05, 1.0])  # of the seeds that are done
    assert table["difference"][0] == pytest.approx(1.0)  # each at its own rate
    assert table["pairs"][0] == 1
    assert best_of_depths(Runs.below(tmp_path), ["train.lr"]) == []  # a seed has no loss
    page = Page(report(tmp_path, best=["lr"], against="post_ln"))
    assert "The same losses choose the best train.lr and are compared; no interval" in page.text
    row = next(row for row in page.rows if row[0] == "Post-LN")
    at = next(row for row in page.rows if row[0] == "setting").index("best train.lr")
    assert row[at : at + 2] == ["0.4", "highest"]


def test_a_setting_without_an_ended_run_has_no_best_rate(tmp_path: Path) -> None:
    make_runs(tmp_path, lr=(0.1, 0.2), seed=(0, 1))
    make_runs(tmp_path, scheme="post_ln", lr=(0.1, 0.2), seed=(0, 1), state="interrupted")
    table = compare(tmp_path, "post_ln", ["train.lr"])
    assert table["val_loss"].isna().tolist() == table["train.lr"].isna().tolist() == [False, True]
    lost = table.iloc[1]
    assert (lost.outcome, lost.edge, lost.seeds) == ("4 interrupted", "", 2)
    assert list(table.pairs) == [0, 0]


def test_a_study_without_the_baseline_is_there_without_it(tmp_path: Path) -> None:
    make_rates(tmp_path / "rates")
    make_run(tmp_path / "alone")
    table = compare(tmp_path, "post_ln", ["train.lr"])
    assert list(table.study) == ["alone", "rates", "rates"]
    assert list(table.pairs) == [0, 1, 0]
    by_difference = compare(tmp_path, "post_ln", ["train.lr"], sort="difference")
    assert list(by_difference.study) == ["rates", "alone", "rates"]
    alone = compare(tmp_path / "rates", "post_ln", ["train.lr"])
    assert list(table.columns) == ["study", *alone.columns]
    page = Page(report(tmp_path, against="post_ln", best=["train.lr"]))
    assert [row.count("difference") for row in page.rows if row[0] == "setting"] == [0, 1]
    with pytest.raises(ConfigError, match="unknown key"):
        compare(tmp_path, "train.clip=1")
    shutil.copytree(tmp_path / "alone", tmp_path / "copy")
    (together,) = compare([tmp_path / "alone", tmp_path / "copy"]).to_dict("records")
    assert "study" not in together and together["seeds"] == 1  # the same run once
