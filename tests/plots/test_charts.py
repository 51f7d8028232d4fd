"""The other charts and their files: right for one run and for many."""

import math
import re
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from helpers.extensions import has, needs
from helpers.plot_runs import caption, make_chart, make_run, make_runs, rows, words, write_table
from helpers.sampling import some
from matplotlib.transforms import Bbox

import deepstack
from deepstack.base.errors import ConfigError, NothingMatchedError
from deepstack.plots import CHARTS, draw
from deepstack.plots.files import FORMATS
from deepstack.plots.page import Page
from deepstack.plots.style import deepstack_style
from deepstack.records import Run, RunFolder

LOST: Any = {"state": "diverged", "updates": [math.nan], "losses": [math.nan]}
ZEROS = np.zeros((2, 6))
OF_TRAINING = "training loss without context (expected)"

# --- the other charts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("masked", "expected", "value"),
    [(2.5, 2.5, 3.26), (None, 2.0, 2.98)],
)
def test_each_loss_has_the_reference_of_its_positions(
    tmp_path: Path, masked: float | None, expected: float, value: float
) -> None:
    make_runs(tmp_path, depth=(6, 18), masked=masked, optimal=1.75)
    chart = make_chart("loss_vs_step", tmp_path)
    assert len(chart.figure.axes) == 1
    levels = rows(chart, kind="level")
    assert dict(zip(levels["series"], levels["y"], strict=True)) == {
        "best without context": value, "Bayes optimum": 1.75,
    } | ({OF_TRAINING: 2.98} if masked else {})  # fmt: skip
    for kind, points in (
        ("training", [[1, 3.9], [2, 3.8], [3, 3.7], [4, 3.6], [5, 3.5]]),
        ("validation", [[0, 6.0], [5, expected]]),
    ):
        drawn = rows(chart, kind=kind, series="DeepNorm, N = 6")[["x", "y"]]
        assert drawn.to_numpy() == pytest.approx(np.array(points))
    final = make_chart("final_loss_vs_depth", tmp_path)
    assert rows(final, kind="point")["y"].tolist() == [expected] * 2
    assert rows(final, kind="level")["series"].tolist() == ["best without context", "Bayes optimum"]


def test_losses_of_different_chains_are_shown_above_their_least_loss(tmp_path: Path) -> None:
    """Seed 0 ends 0.5 above 1.0 and seed 1 ends 0.5 above 1.4: no deviation is left."""
    for seed, least in ((0, 1.0), (1, 1.4)):
        given = {"seed": seed, "masked": least + 0.5, "optimal": least}
        make_runs(tmp_path, depth=(6, 18), lr=(1e-3, 4e-3), **given)
    for name in ("final_loss_vs_depth", "loss_vs_lr"):
        chart = make_chart(name, tmp_path)
        points = chart.data[chart.data["kind"].isin(["point", "best"])]
        assert points["y"].to_numpy() == pytest.approx(0.5)
        assert (points["high"] - points["low"]).to_numpy() == pytest.approx(0.0, abs=1e-9)
        assert rows(chart, kind="level")["series"].unique().tolist() == ["best without context"]
        labels = {axes.get_ylabel().replace("\n", " ") for axes in chart.figure.axes}
        assert any("Bayes optimum (nats)" in label for label in labels)


def test_charts_draw_the_unigram_loss_that_tables_and_outcomes_have(tmp_path: Path) -> None:
    """Of the same held-out positions, the mean over seeds; entropies are not drawn."""
    losses = {0: 3.0, 1: 3.5}
    for path in make_runs(tmp_path / "study", depth=(6, 18), seed=(0, 1), lr=(1e-3, 1e-2)):
        unigram = losses[Run(path).get("seed")]
        write_table(
            RunFolder(path), "evals", ("step", "loss", "loss_masked", "unigram_loss"),
            [(0, 5.0, 5.0, unigram), (5, unigram - 0.5, unigram - 0.5, unigram)],
        )  # fmt: skip
    levels = [
        rows(make_chart(name, tmp_path), kind="level")
        for name in ("loss_vs_step", "final_loss_vs_depth", "loss_vs_lr")
    ]
    for one in levels:  # all predicted positions show [MASK]: training has the same level
        assert dict(zip(one["series"], one["y"], strict=True)) == {"best without context": 3.25}
    assert deepstack.compare(tmp_path)["unigram"].tolist() == pytest.approx([3.25] * 4)
    assert rows(make_chart("outcomes", tmp_path))["value"].to_numpy() == pytest.approx(-0.5)


def test_a_seed_that_diverged_or_did_not_end_has_no_final_loss(tmp_path: Path) -> None:
    make_runs(tmp_path, depth=(6, 18), seed=(0, 1), masked=lambda depth, seed: 2.0 + 0.1 * seed)
    make_run(tmp_path, depth=18, seed=2, state="diverged", masked=5.0)
    make_runs(tmp_path, depth=48, seed=(0, 1), state="diverged", masked=5.0)
    make_run(tmp_path, depth=100, state="interrupted")
    chart = make_chart("final_loss_vs_depth", tmp_path)
    points = rows(chart, kind="point").set_index("x")
    assert points.index.tolist() == [6, 18, 48]
    assert points["y"].tolist() == pytest.approx([2.05, 2.05, 5.0])
    assert points["n"].tolist() == [2, 2, 2] and math.isnan(points["low"][48])
    assert points["mark"].dropna().to_dict() == {18: "some diverged", 48: "diverged"}
    assert [6, 18] in [np.asarray(one.get_xdata()).tolist() for one in chart.figure.axes[0].lines]
    lost = "all seeds diverged: last finite value"
    assert {"some seeds diverged: mean of the others", lost} <= set(words(chart))


def test_losses_of_two_tasks_share_no_axis_and_no_line(tmp_path: Path) -> None:
    """Not even if each has another learning rate."""
    markov: Any = {"config": {"task.name": "markov"}, "references": {"unigram_entropy": 1.5}}
    for depth in (6, 48):
        make_run(tmp_path / "study", depth=depth, masked=2.5)
        make_run(tmp_path / "study", depth=depth, lr=2e-3, masked=1.2, **markov)
    make_run(tmp_path / "study", depth=48, lr=4e-3, masked=1.2, **markov)
    for name in ("final_loss_vs_depth", "loss_vs_lr"):
        chart = make_chart(name, tmp_path)
        assert len(chart.figure.axes) == 2
        (markov, losses), (text, others) = chart.data.groupby("panel")["y"].unique().items()
        assert str(markov).endswith("markov") and sorted(losses) == [1.2, 1.5]
        assert str(text).endswith("text") and sorted(others) == [2.5, 3.26]
    ends = [axes.get_ylim() for axes in make_chart("final_loss_vs_depth", tmp_path).figure.axes]
    assert ends[0] != ends[1]


def test_the_best_learning_rate_is_one_at_which_every_seed_finished(tmp_path: Path) -> None:
    losses = {1e-3: 2.5, 1e-2: 2.0, 1e-1: 1.5}
    make_runs(tmp_path, lr=(*losses,), seed=(0, 1), masked=lambda lr, seed: losses[lr])
    make_run(tmp_path, lr=1e-1, seed=1, state="diverged", masked=1.5)
    make_runs(tmp_path, scheme="post_ln", lr=(1e-3, 1e-2), **LOST)
    chart = make_chart("loss_vs_lr", tmp_path)
    assert rows(chart, kind="best")["x"].tolist() == [1e-2] and len(chart.figure.axes) == 1
    assert rows(chart, x=1e-1)["mark"].tolist() == ["some diverged"]
    assert "some seeds diverged: mean of the others" in words(chart)
    assert "nothing finished of Post-LN" in caption(chart)


def test_one_rate_alone_is_not_marked_as_the_best_of_those_tried(tmp_path: Path) -> None:
    make_runs(tmp_path, lr=(1e-3, 1e-2), depth=6)
    make_run(tmp_path, lr=1e-3, depth=12)
    best = rows(make_chart("loss_vs_lr", tmp_path), kind="best")
    assert best["series"].tolist() == ["N = 6"]


OWNERS = {
    "attribution_vs_depth": "attribution", "attribution_vs_step": "attribution",
    "best_lr_vs_depth": "transfer", "bound_vs_depth": "bound", "bound_vs_measured": "bound",
    "coordinate_check": "coordinates", "iso_flop": "laws", "sharpness_vs_step": "sharpness",
    "effective_depth_vs_depth": "depth_use", "effective_depth_vs_step": "depth_use",
    "lens_by_layer": "depth_use",
}  # fmt: skip
"""Chart -> the addition that draws it."""


def of_addition(*case: Any) -> Any:
    """A case of a chart, skipped where the addition that draws it is missing."""
    return pytest.param(*case, marks=[needs(OWNERS[case[0]])] if case[0] in OWNERS else [])


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        of_addition("attribution_vs_depth", {}, "log.attribution_every is 0"),
        of_addition("attribution_vs_depth", {"layers": ZEROS}, "needs runs of two depths"),
        of_addition("attribution_vs_step", {}, "log.attribution_every is 0"),
        of_addition("best_lr_vs_depth", {"depth": (6, 18)}, "two learning rates"),
        of_addition("best_lr_vs_depth", {"lr": (1e-3, 2e-3)}, "needs two depths"),
        of_addition("bound_vs_depth", {}, "log.layers_every is 0"),
        of_addition("bound_vs_measured", {}, "log.layers_every is 0"),
        of_addition("coordinate_check", {}, "no run has a record of every layer"),
        of_addition("coordinate_check", {"layers": ZEROS}, "needs runs of two widths"),
        ("final_loss_vs_depth", {"state": "running"}, "no finished run has a validation loss"),
        ("frontier", {"depth": (6, 18), "lr": lambda depth: 1 / depth}, "two learning rates"),
        ("grad_norm_by_layer", {"layers": ZEROS}, "grad_norm: no value is finite and above 0"),
        ("gradient_ratios", {}, "beta_ln and beta_rc"),
        ("gradient_ratios", {"layers": ZEROS}, "no value is finite"),
        of_addition(
            "iso_flop", {"depth": (2, 8), "flops": lambda depth: depth * 10**9}, "nearly equal"
        ),
        of_addition("iso_flop", {"depth": (2, 8), "flops": None}, "FLOPs in its meta"),
        ("loss_vs_lr", {"depth": (6, 18), "lr": lambda depth: 1 / depth}, "two learning rates"),
        ("loss_vs_lr", {"lr": (1e-3, 1e-2)} | LOST, "every run diverged"),
        ("loss_vs_step", LOST, "no run has a finite value of loss"),
        ("outcomes", {}, "needs finished runs of two schemes, depths"),
        of_addition("sharpness_vs_step", {}, "log.sharpness_every is 0"),
        ("solved_vs_depth", {"solved": 2.0, "state": "running"}, "no finished run"),
        ("update_vs_depth", {"depth": (6, 18), "updates": [0.0, 0.0]}, "above 0 at step 2"),
        ("update_vs_step", LOST, "no run has a finite"),
        of_addition("effective_depth_vs_depth", {}, "deepstack analyze RUN --what lens"),
        of_addition("lens_by_layer", {}, "deepstack analyze RUN --what lens"),
        of_addition("effective_depth_vs_step", {}, "deepstack analyze RUN --what lens --step N"),
    ],
)
def test_refused_charts_name_reasons(tmp_path: Path, name: str, settings: Any, reason: str) -> None:
    make_runs(tmp_path, **settings)
    with pytest.raises(NothingMatchedError, match=re.escape(reason)):
        make_chart(name, tmp_path)


def test_values_of_layers_equal_the_snapshots(tmp_path: Path) -> None:
    values = np.array([[1.0, 2.0, 4.0], [3.0, 0.0, 5.0]])
    make_run(tmp_path, depth=3, layers=values)
    chart = make_chart("grad_norm_by_layer", tmp_path)
    assert rows(chart, series="step 1")["y"].tolist() == [1.0, 2.0, 4.0]
    # Zero has no place on a log axis: it is left out, and the caption says so.
    assert rows(chart, series="step 2")["x"].tolist() == [1, 3]
    assert "1 point at or below 0 not shown" in caption(chart)
    chart = make_chart("layer_step_heat_map", tmp_path, diagnostic="stream_norm")
    assert rows(chart, x=2, y=3)["value"].item() == -values[1, 2] and len(chart.data) == 6
    with pytest.raises(NothingMatchedError, match="'gradnorm'; deepstack list diagnostics has all"):
        make_chart("layer_step_heat_map", tmp_path, diagnostic="gradnorm")


@pytest.mark.parametrize(
    ("name", "values", "scale"),
    [("grad_norm", [1, 10, 100], "log"), ("grad_norm", [0, 1, 100], "log"),
     ("grad_norm", [1, 5, 10], "linear"), ("stream_norm", [-1, -10, -100], "linear")],
)  # fmt: skip
def test_signed_values_have_a_plain_axis(
    tmp_path: Path, name: str, values: Any, scale: str
) -> None:
    path = make_run(tmp_path, depth=1)
    RunFolder(path).write_layers({name: np.array(values, dtype=float)[:, None]}, [1, 2, 3])
    chart = make_chart("last_layer_vs_step", tmp_path, diagnostic=name)
    drawn = [v for v in values if v]
    assert rows(chart, kind="line")["y"].tolist() == drawn
    (axes,) = chart.figure.axes
    assert axes.get_yscale() == scale and axes.get_ylim()[0] < min(drawn)
    assert ("at or below 0" in caption(chart)) == (0 in values)


def test_panels_show_the_greatest_depth_of_each_scheme(tmp_path: Path) -> None:
    make_runs(
        tmp_path / "s", scheme=("deepnorm", "post_ln"), depth=(2, 5), seed=(1, 0),
        layers=lambda scheme, depth, seed: np.full((2, depth), 1.0 + seed),
    )  # fmt: skip
    chart = make_chart("grad_norm_by_layer", tmp_path)
    assert list(dict.fromkeys(chart.data["panel"])) == ["DeepNorm, N = 5", "Post-LN, N = 5"]
    assert set(chart.data["y"]) == {1.0}
    assert "each at its greatest depth · seed 0" in caption(chart)


# --- drawing -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results") / "study"
    both: Any = {
        "scheme": ("deepnorm", "post_ln"), "depth": (2, 6, 12, 24),
        "layers": lambda depth, **_: np.exp(-np.arange(depth) / 9.0) * np.ones((4, 1)),
        "solved": lambda depth, **_: depth,
        "masked": lambda depth, **_: 2.4 + 1 / depth,
    }  # fmt: skip
    make_runs(root, seed=(0, 1), **both)
    make_runs(root, lr=3e-3, **both)
    return root


@pytest.mark.parametrize("name", some(CHARTS.names(), 40, 1))
def test_every_chart_is_written_in_four_forms(name: str, study: Path, tmp_path: Path) -> None:
    paths = draw(study, [name], tmp_path)
    assert [path.name for path in paths] == [f"{name}.{kind}" for kind in (*FORMATS, "txt")]
    assert all(80 < path.stat().st_size < 600_000 for path in paths)
    assert b"/Type3" not in paths[0].read_bytes()  # no journal takes them


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes_and_leave_matplotlib_alone(tmp_path: Path) -> None:
    make_runs(tmp_path / "s", depth=(2, 6), layers=lambda depth: np.ones((4, depth)))
    before = dict(mpl.rcParams)
    names = ["update_vs_depth", "layer_step_heat_map"]
    first = draw(tmp_path / "s", names, tmp_path / "a")
    with mpl.rc_context({"font.size": 30, "lines.linewidth": 9}):
        second = draw(tmp_path / "s", names, tmp_path / "b")
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("name", some(CHARTS.names(), 18))
def test_no_text_is_cut_off_or_overlaps(name: str, study: Path) -> None:
    figure = make_chart(name, study, layout=True).figure
    figure.set_dpi(200)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in [*figure.texts, *figure.legends]]
    boxes += [axes.get_tightbbox() for axes in figure.axes]
    boxes = [box for box in boxes if box is not None and box.width > 0]
    for box in boxes:
        assert Bbox.intersection(box, figure.bbox.padded(1)).bounds == pytest.approx(box.bounds)
    for one, other in combinations(boxes, 2):
        shared = Bbox.intersection(one, other)
        assert shared is None or min(shared.size) <= 3


def test_the_label_of_a_low_axis_is_no_longer_than_it() -> None:
    with deepstack_style():
        page = Page(1, 2, height=0.8)
        for axes in page.axes:
            axes.set_ylabel("a label that is much longer than the axis beside which it stands")
        figure = page.finish("title", "subtitle", [])
    figure.canvas.draw()
    assert page.axes[0].yaxis.label.get_window_extent().height <= 0.82 * figure.dpi


def test_charts_that_cannot_be_drawn_are_named_with_the_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path / "study")
    messages: list[str] = []
    paths = draw(tmp_path / "study", say=messages.append, formats=("csv",))
    drawn = [*(["loss_vs_compute"] if has("laws") else []), "loss_vs_step", "update_vs_step"]
    assert [path.stem for path in paths] == drawn
    assert all(path.parent == tmp_path / "study" / "figures" for path in paths)
    left_out = [name for name in CHARTS.names() if name not in drawn]
    assert [line.split(" is not drawn: ")[0] for line in messages] == left_out
    assert "all have N = 6" in messages[left_out.index("update_vs_depth")]
    assert "log.layers_every" in messages[left_out.index("grad_norm_by_layer")]
    with pytest.raises(NothingMatchedError, match="needs runs of two depths"):
        draw(tmp_path / "study", ["update_vs_depth"])
    (alone,) = draw(run, ["loss_vs_step"], formats=("csv",))
    assert alone.parent == run / "figures"


def test_runs_without_a_step_are_left_out_of_charts(tmp_path: Path) -> None:
    path = make_run(tmp_path / "study")
    new = RunFolder(tmp_path / "study" / "new")
    new.write_config("seed: 0\nmodel: {scheme: deepnorm, depth: 48}\n")
    assert len(draw(tmp_path, ["loss_vs_step"], formats=("csv",))) == 1
    shutil.rmtree(path)
    with pytest.raises(NothingMatchedError, match="no run has a step"):
        draw(tmp_path)


def test_published_values_are_drawn_and_listed(tmp_path: Path) -> None:
    make_runs(tmp_path / "study", depth=(6, 18))
    reference = tmp_path / "study" / "reference.csv"
    reference.write_text(
        "# digitised\nchart,x,y,label\nupdate_vs_depth,6,0.018,published\nloss_vs_step,1,3,other\n"
    )
    draw(tmp_path, ["update_vs_depth"], tmp_path / "out", formats=("csv",))
    table = pd.read_csv(tmp_path / "out" / "update_vs_depth.csv")
    found = table[table["kind"] == "reference"]
    assert found[["series", "x", "y"]].values.tolist() == [["published", 6, 0.018]] * 2
    given = pd.DataFrame({"chart": ["update_vs_depth"], "x": [18], "y": [0.5], "label": ["given"]})
    deepstack.plot(tmp_path, "update_vs_depth", tmp_path / "out", reference=given, formats="csv")
    table = pd.read_csv(tmp_path / "out" / "update_vs_depth.csv")
    assert set(table.loc[table["kind"] == "reference", "series"]) == {"given"}
    reference.write_text("chart,x,label\n")
    with pytest.raises(ConfigError, match=r"reference\.csv: no column y; expected"):
        draw(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("chart,x,y,label\nupdate_vs_dept,6,1,a\n", r":2: unknown chart .*'update_vs_depth'"),
        ("# a\nchart,x,y,label\nupdate_vs_depth,6,1,a, b\n", r":3: found 5 values; quote a label"),
        ("chart,x,y,label\nupdate_vs_depth,6,0;1,a\n", r":2: y: found '0;1'; allowed a number"),
        ("chart,x,y,label\nupdate_vs_depth,6\n", r":2: found 2 values; allowed 4"),
    ],
)
def test_a_wrong_row_of_published_values_is_refused_by_line(
    tmp_path: Path, text: str, reason: str
) -> None:
    make_runs(tmp_path / "study", depth=(6, 18))
    (tmp_path / "study" / "reference.csv").write_text(text)
    with pytest.raises(ConfigError, match=rf"reference\.csv{reason}"):
        draw(tmp_path, ["update_vs_depth"], formats=("csv",))


@pytest.mark.parametrize("separator", [";", "\t"])
def test_columns_of_published_values_have_the_separator_of_the_first_line(
    tmp_path: Path, separator: str
) -> None:
    make_runs(tmp_path / "study", depth=(6, 18))
    rows_ = ["chart;x;y;label", "update_vs_depth;6;0,018;a, b"]
    text = "\n".join(rows_).replace(";", separator)
    (tmp_path / "study" / "reference.csv").write_text(text)
    draw(tmp_path, ["update_vs_depth"], tmp_path / "out", formats=("csv",))
    table = pd.read_csv(tmp_path / "out" / "update_vs_depth.csv")
    found = table[table["kind"] == "reference"].iloc[0]
    assert (found["series"], found["x"], found["y"]) == ("a, b", 6, 0.018)


@needs("laws")
def test_published_values_are_drawn_beside_a_fitted_law(tmp_path: Path) -> None:
    make_runs(
        tmp_path, depth=(2, 4, 8, 16, 32), seed=(0, 1, 2),
        masked=lambda depth, seed: 1.5 + (1 + 0.01 * seed) / depth,
    )  # fmt: skip
    published = pd.DataFrame([{"chart": "law_fit", "x": 4, "y": 1.75, "label": "published"}])
    chart = make_chart("law_fit", tmp_path, reference=published)
    assert rows(chart, kind="reference")["y"].tolist() == [1.75]
    assert "published" in words(chart)
