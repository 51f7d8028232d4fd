"""Charts of awkward folders: nothing in them misleads a reader of a paper, or cannot be read."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.extensions import needs
from helpers.plot_runs import caption, make_chart, make_run, make_runs, rows, without_layout, words

from deepstack.plots import Options, figure
from deepstack.plots.metric import metric
from deepstack.records import find_runs
from deepstack.schemes import SCHEMES

# --- seeds ---------------------------------------------------------------------------------


OF_ATTRIBUTION = [
    pytest.param(name, marks=needs("attribution"))
    for name in ("attribution_vs_depth", "attribution_vs_step")
]


@pytest.mark.parametrize(
    ("name", "value", "left_out"),
    [("update_vs_depth", 2, 4), ("loss_vs_step", 2, 4), ("final_loss_vs_depth", 2.5, 2)],
)
def test_other_intervals_are_no_other_seed(
    tmp_path: Path, name: str, value: float, left_out: int
) -> None:
    """Of the runs with one seed, one that ended counts."""
    every, states = (1, 5, 10), ("interrupted", "done", "done")  # by the lr in the folder's name
    make_runs(
        tmp_path, depth=(6, 18), lr=(0, 1, 2),
        updates=lambda depth, lr: [1.0 + (lr > 0)], losses=lambda depth, lr: [1.0 + (lr > 0)],
        config=lambda depth, lr: {"train.lr": 1e-3, "log.layers_every": every[lr]},
        state=lambda depth, lr: states[lr],
    )  # fmt: skip
    chart = make_chart(name, tmp_path)
    assert set(chart.data["n"].dropna()) <= {1, 2}  # 2: points of a fit
    drawn = chart.data[chart.data["kind"].isin(["point", "training"])]
    assert set(drawn["y"]) == {value}
    assert "low" not in chart.data and "standard deviation" not in caption(chart)
    assert f"{left_out} runs hidden: same setting and seed as another run" in caption(chart)


# --- bands and points ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["update_vs_step", "loss_vs_step"])
def test_a_run_of_one_step_is_seen(tmp_path: Path, name: str) -> None:
    make_run(tmp_path, steps=1, layers=np.ones((1, 6)))
    (axes,) = make_chart(name, tmp_path).figure.axes
    alone = [line for line in axes.lines if len(np.atleast_1d(line.get_xdata())) == 1]
    assert alone and all(line.get_marker() == "o" for line in alone)


@pytest.mark.parametrize("name", ["update_vs_step", "update_vs_depth", "gradient_ratios"])
def test_bands_are_not_cut_off_by_the_axis(tmp_path: Path, name: str) -> None:
    factors = (1.0, 1.0, 2.0)
    make_runs(
        tmp_path, depth=(6, 18), seed=(0, 1, 2),
        updates=lambda depth, seed: [factors[seed] * 0.01 * t for t in (1, 2, 3)],
        layers=lambda depth, seed: np.full((3, depth), factors[seed]),
    )  # fmt: skip
    chart = make_chart(name, tmp_path)
    drawn = chart.data[chart.data["high"].notna()]
    assert len(drawn) and (drawn["low"] > 0).all()
    low, high = chart.figure.axes[0].get_ylim()
    panel = drawn[drawn["panel"] == drawn["panel"].iloc[0]] if "panel" in drawn else drawn
    assert low < panel["low"].min() and panel["high"].max() < high


# --- what diverged, what did not move ------------------------------------------------------


@pytest.fixture
def lost_seed(tmp_path: Path) -> Path:
    """Three depths and two seeds, of which one of the deepest leaves the finite numbers."""
    make_runs(
        tmp_path, depth=(6, 18, 48), seed=(0, 1),
        updates=lambda depth, seed: [0.01 * depth, 0.02 * depth, 0.03 * depth],
        layers=lambda depth, seed: np.ones((3, depth)),
    )  # fmt: skip
    make_run(
        tmp_path, depth=48, seed=1, updates=[0.48, 0.96, math.inf], layers=np.ones((3, 48)),
        state="diverged",
    )  # fmt: skip
    return tmp_path


@needs("bound")
def test_a_diverged_seed_marks_the_bound_at_its_depth(lost_seed: Path) -> None:
    chart = make_chart("bound_vs_depth", lost_seed)
    for panel in ("measured", "right-hand side"):
        points = rows(chart, kind="point", panel=panel)
        assert points["mark"].dropna().to_dict() == {points.index[-1]: "some diverged"}
        assert rows(chart, kind="fit", panel=panel)["n"].item() == 2
    assert "some seeds diverged" in caption(chart) and np.isfinite(points["y"]).all()


@pytest.mark.parametrize("name", [*OF_ATTRIBUTION, "gradient_ratios"])
def test_means_name_the_seeds_that_diverged(lost_seed: Path, name: str) -> None:
    chart = make_chart(name, lost_seed)
    assert "48 (1 of 2 seeds)" in caption(chart)
    assert set(rows(chart, kind="fit").get("n", ())) == (
        {2} if name == "attribution_vs_depth" else set()
    )


def test_a_seed_counts_until_it_has_diverged(lost_seed: Path) -> None:
    """Values before the divergence count in the mean; a last finite value is not the final one."""
    for step, n in ((2, 2), (3, 1)):
        chart = make_chart("update_vs_depth", lost_seed, at_step=step)
        points = rows(chart, kind="point", x=48).set_index("panel")
        assert points["n"].to_dict() == {"step 1": 2, f"step {step}": n}
        assert points["y"][f"step {step}"] == pytest.approx({2: 0.96, 3: 1.44}[step])
        assert rows(chart, kind="fit")["n"].tolist() == [3, 1 + n]
        assert ("some seeds diverged: mean of the others" in caption(chart)) == (n == 1)
    make_run(lost_seed, depth=48, updates=[1.0, 2.0, math.inf], state="diverged")
    chart = make_chart("update_vs_depth", lost_seed, at_step=3)
    (point,) = rows(chart, panel="step 3", x=48).to_dict("records")
    assert point["mark"] == "diverged" and math.isnan(point["low"])
    assert "all seeds diverged: last finite value" in caption(chart)
    ends = [max(np.asarray(line.get_xdata()), default=0) for line in chart.figure.axes[1].lines]
    assert 18 in ends  # the line stops before it


@pytest.mark.parametrize("name", OF_ATTRIBUTION)
def test_a_setting_in_which_nothing_moved_is_named(tmp_path: Path, name: str) -> None:
    both: Any = {"depth": (6, 18), "layers": lambda depth: np.ones((5, depth))}
    make_runs(tmp_path, **both)
    make_runs(tmp_path, scheme="rezero", updates=[0.0] * 5, **both)
    make_run(tmp_path, scheme="post_ln", depth=6, updates=[0.1], layers=np.ones((1, 6)))
    chart = make_chart(name, tmp_path, at_step=1)
    assert {panel.split(",")[0] for panel in chart.data["panel"]} == {"DeepNorm"}
    what = "depths: Post-LN; ReZero" if name.endswith("depth") else "steps: Post-LN, N = 6; ReZero"
    assert f"moved at fewer than two {what}" in caption(chart)


# --- zeros on log axes ---------------------------------------------------------------------


def test_updates_of_zero_are_named(tmp_path: Path) -> None:
    make_runs(tmp_path, depth=(6, 18), updates=[0.0, 0.1])
    chart = make_chart("update_vs_depth", tmp_path)
    assert words(chart).count("no value") == 1 and "2 points at or below 0" in caption(chart)


# --- legends and labels --------------------------------------------------------------------


def test_a_caption_says_which_lines_may_still_grow(tmp_path: Path) -> None:
    states = {6: "done", 18: "running", 48: "diverged"}
    make_runs(tmp_path, depth=(*states,), state=lambda depth: states[depth])
    for name in ("loss_vs_step", "update_vs_depth"):
        assert "unfinished: 1 of 3 runs" in caption(make_chart(name, tmp_path))
    make_run(tmp_path, depth=18)
    assert "unfinished" not in caption(make_chart("loss_vs_step", tmp_path))


@needs("attribution")
def test_titles_of_panels_stay_apart(tmp_path: Path) -> None:
    for i in range(4):
        path = f"a/folder/{i}/with_a_name_that_is_longer_than_a_panel_of_a_paper_is_wide.txt"
        config = {"task.path": path, "train.lr": 1e-3}
        make_run(tmp_path, lr=i, config=config, layers=np.ones((3, 6)))
    figure = make_chart("attribution_vs_step", tmp_path, layout=True).figure
    figure.canvas.draw()
    titles = [axes._left_title.get_window_extent() for axes in figure.axes[:4]]
    for left, right in pairwise(titles):
        assert left.x1 < right.x0
    assert titles[-1].x1 <= figure.bbox.width


def test_a_map_keeps_the_order_of_sorted_runs(tmp_path: Path) -> None:
    make_runs(tmp_path, scheme=("deepnorm", "post_ln"), depth=(6, 18))
    for order in (["deepnorm", "post_ln"], ["post_ln", "deepnorm"]):
        chosen = [
            run for name in order for run in find_runs(tmp_path) if run.get("model.scheme") == name
        ]
        labels = figure(chosen, "outcomes", ordered=True).axes[0].get_yticklabels()
        assert [label.get_text() for label in labels] == [SCHEMES[name].label for name in order]


@pytest.mark.parametrize("name", ["outcomes", "frontier"])
def test_names_along_a_map_stay_apart(tmp_path: Path, name: str) -> None:
    options = "model.scheme_options.a_rather_long_option_name"
    longer = options + "_and_one_that_is_even_longer"
    depths = (6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 200, 300, 500, 700, 1000)
    make_runs(tmp_path, depth=depths, lr=(1, 2), config=lambda depth, lr: {options: lr, longer: lr})
    make_run(tmp_path, depth=1000, lr=3, config={options: 2, longer: 2})
    chart = make_chart(name, tmp_path, layout=True)
    chart.figure.set_dpi(200)
    chart.figure.canvas.draw()
    for axes in chart.figure.axes:
        assert axes.bbox.width > 0.3 * chart.figure.bbox.width / len(chart.figure.axes)
        for axis in (axes.xaxis, axes.yaxis):
            shown = [label for label in axis.get_ticklabels() if label.get_visible()]
            boxes = [label.get_window_extent() for label in shown]
            assert all(box.x0 >= 0 for box in boxes)
            assert not any(one.overlaps(other) for one, other in pairwise(boxes))


# --- logarithmic axes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "options", "lost"),
    [
        ("loss_vs_step", {"losses": [3.0, 0.0, -1.0, 2.0, 1.0]}, {"y_scale": "log"}, 2),
        ("loss_vs_step", {"losses": [3.0] * 5}, {"x_scale": "log"}, 1),  # the evaluation at step 0
        ("update_vs_step", {"updates": [0.0, 0.1, 5.0]}, {}, 1),
        ("update_vs_depth", {"depth": (6, 18), "updates": [0.0, 0.1]}, {}, 2),
        ("final_loss_vs_depth", {"depth": (6, 18), "masked": lambda depth: 6.0 - depth / 2},
         {"y_scale": "log"}, 1),
        ("grad_norm_by_layer", {"layers": np.arange(12.0).reshape(2, 6)}, {}, 1),
    ],
)  # fmt: skip
def test_points_hidden_by_a_logarithmic_axis_are_counted_and_not_in_the_csv(
    tmp_path: Path, name: str, settings: Any, options: Any, lost: int
) -> None:
    make_runs(tmp_path, **settings)
    chart = make_chart(name, tmp_path, **options)
    words = f"{lost} point{'s' * (lost > 1)} at or below 0 not shown (log axis)"
    assert words in caption(chart)
    axes = chart.figure.axes[0]
    for column, scale in (("x", axes.get_xscale()), ("y", axes.get_yscale())):
        assert scale != "log" or (chart.data[column].dropna() > 0).all()


def test_a_metric_counts_what_its_logarithmic_axis_hides(tmp_path: Path) -> None:
    make_runs(tmp_path, updates=[0.0, -0.5, 0.2, 30.0])
    with without_layout():
        chart = metric(find_runs(tmp_path), "step", "model_update", options=Options(y_scale="log"))
    assert chart.data["y"].tolist() == [0.2, 30.0]
    assert "2 points at or below 0 not shown (log axis)" in caption(chart)


def test_a_run_that_diverged_at_once_has_no_final_loss(tmp_path: Path) -> None:
    """Its only evaluation is that of its start, which may lie below chance."""
    make_runs(tmp_path, depth=(6, 18), masked=2.5)
    early = make_run(tmp_path, scheme="post_ln", state="diverged", masked=2.5)
    table = early / "evals.csv"
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:2]))
    chart = make_chart("final_loss_vs_depth", tmp_path)
    assert set(rows(chart, kind="point")["series"]) == {"DeepNorm"}
    assert "left out: 1 run that diverged before a second evaluation" in caption(chart)


def test_curves_are_means_over_a_twentieth_of_their_steps(tmp_path: Path) -> None:
    losses = [3.0 + (-1) ** step for step in range(200)]
    for scheme, every in (("deepnorm", 1), ("post_ln", 20)):
        path = make_run(tmp_path, scheme=scheme, steps=200, losses=losses)
        head, *lines = (path / "steps.csv").read_text().splitlines(keepends=True)
        (path / "steps.csv").write_text("".join([head, *lines[every - 1 :: every]]))
    chart = make_chart("loss_vs_step", tmp_path)
    assert "mean over 1 to 10 rows" in caption(chart)
    lines = rows(chart, kind="training")
    assert lines[lines["series"] == "Post-LN"]["y"].tolist() == [losses[19]] * 10
    assert lines[lines["series"] == "DeepNorm"]["y"].iloc[10:-10].tolist() == [3.0] * 180


def test_a_metric_of_another_trainer_has_no_unit_on_its_axis(tmp_path: Path) -> None:
    for depth in (6, 18):
        path = make_run(tmp_path, depth=depth, masked=None)
        columns = json.loads((path / "columns.json").read_text())
        columns["columns"]["loss"] = {"symbol": "mse", "unit": ""}
        (path / "columns.json").write_text(json.dumps(columns))
    for name in ("final_loss_vs_depth", "loss_vs_step"):
        assert "nats" not in caption(make_chart(name, tmp_path))


@pytest.mark.parametrize(("sizes", "drawn"), [((8.0, 16.0, 32.0), 3), ((8.0, 16.0, 32.0, 64.0), 0)])
def test_lines_of_unrelated_states_are_drawn_for_all_widths_or_none(
    sizes: tuple[float, ...], drawn: int, tmp_path: Path
) -> None:
    for number, size in enumerate(sizes):
        path = make_run(tmp_path, config={"model.d_model": 8 * 2**number})
        columns = json.loads((path / "columns.json").read_text())
        (path / "columns.json").write_text(json.dumps(columns | {"f0_norm": size}))
        path.rename(path.with_name(f"{path.name}-{number}"))
    levels = rows(make_chart("update_vs_step", tmp_path), kind="level")
    assert len(set(levels["y"])) == drawn
