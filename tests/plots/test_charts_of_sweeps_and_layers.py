"""Charts of learning rates, FLOPs, the use of depth and gradient ratios."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from helpers.extensions import needs
from helpers.plot_runs import (
    caption,
    make_chart,
    make_run,
    make_runs,
    rows,
    words,
    write_analyses,
)

from deepstack.plots.style import scheme_style
from deepstack.records import Run, RunFolder

# --- learning rates --------------------------------------------------------------------------


RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)


def study_of_rates(root: Path, scheme: str, power: float, rates: tuple[float, ...] = RATES) -> None:
    """Losses that are parabolas in log lr around 2e-3·(N/6)^power, equal for all seeds."""

    def loss(depth: int, lr: float, seed: int) -> float:
        distance = math.log(lr / (2e-3 * (depth / 6) ** power))
        return 2.0 + 0.1 * distance**2 + 0.01 * seed

    make_runs(root, scheme=scheme, depth=(6, 24, 54), lr=rates, seed=(0, 1, 2), masked=loss)


@needs("transfer")
def test_the_best_rate_has_the_exponent_of_its_parabolas_and_laws_beside_it(tmp_path: Path) -> None:
    study_of_rates(tmp_path, "deepnorm", -0.5)
    chart = make_chart("best_lr_vs_depth", tmp_path)
    points = rows(chart, kind="point")
    expected = [2e-3 * (depth / 6) ** -0.5 for depth in (6, 24, 54)]
    assert points["y"].tolist() == pytest.approx(expected) and points["n"].tolist() == [3] * 3
    (fit,) = rows(chart, kind="fit").to_dict("records")
    for name in ("exponent", "exponent_low", "exponent_high"):
        assert fit[name] == pytest.approx(-0.5)
    laws = rows(chart, kind="law")
    assert set(laws["series"]) == {"N^(−3/2)", "N^(−1/2)", "N^0"}
    assert rows(chart, series="N^(−1/2)")["y"].tolist() == pytest.approx(expected)
    assert "DeepNorm: −0.50 (−0.50 to −0.50)" in words(chart)
    (axes,) = chart.figure.axes
    assert scheme_style("deepnorm")["color"] in {line.get_color() for line in axes.lines}


@needs("transfer")
def test_a_best_rate_at_the_edge_is_hollow_and_a_lone_depth_is_named(tmp_path: Path) -> None:
    study_of_rates(tmp_path, "deepnorm", -0.5, RATES[2:])
    make_runs(tmp_path, scheme="rezero", lr=RATES)
    chart = make_chart("best_lr_vs_depth", tmp_path)
    assert rows(chart, kind="point")["mark"].dropna().tolist() == ["edge", "edge"]
    assert "best rate tried lies at the edge" in caption(chart)
    assert "DeepNorm: –" in words(chart) and rows(chart, kind="fit").empty
    assert "DeepNorm, no exponent: N = 24: best at the lowest rate tried" in caption(chart)
    assert "ReZero: no seed has a loss at every rate of two depths" in caption(chart)


@pytest.mark.slow(turn=28)
@needs("attribution")
def test_each_role_has_a_line_with_its_exponent(tmp_path: Path) -> None:
    make_runs(
        tmp_path, scheme=("deepnorm", "post_ln"), depth=(6, 18, 54), seed=(0, 1),
        updates=lambda scheme, depth, seed: [0.01 * depth * (1 + 0.1 * seed)],
        layers=lambda scheme, depth, seed: np.ones((2, depth)),
    )  # fmt: skip
    chart = make_chart("update_by_role", tmp_path)
    assert list(dict.fromkeys(chart.data["panel"])) == ["DeepNorm", "Post-LN"]
    fits = rows(chart, kind="fit", panel="Post-LN")
    assert fits["series"].tolist() == ["q", "w2", "norm_gain", "together"]
    assert fits["exponent"].tolist() == pytest.approx([1.0] * 4)
    q = rows(chart, kind="point", panel="DeepNorm", series="q")
    assert q["y"].tolist() == pytest.approx([0.00105 * depth for depth in (6, 18, 54)])
    assert "norm gain: 1.00 (2 seeds), 1.00 (2 seeds)" in words(chart)
    for axes in chart.figure.axes:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


# --- FLOPs -----------------------------------------------------------------------------------


DEPTHS = (2, 8, 32)


def least(budget: float) -> float:
    """The depth at which the planted loss is least."""
    return 6.0 * (budget / 1e12) ** 0.5


def study_of_budgets(root: Path, size: str = "model.depth") -> None:
    """Losses that are parabolas in log size, trained with rates chosen for each cell."""
    for steps, n, seed in product((10, 40), DEPTHS, (0, 1)):
        budget = steps * 1e11
        away = math.log(n / least(budget))
        make_run(
            root, depth=n if size == "model.depth" else 6, seed=seed,
            lr=1e-3 * n * (1 + steps // 40), steps=steps, config={size: n, "model.d_ff": 4 * n},
            masked=2.5 - 0.2 * math.log10(budget / 1e12) + 0.1 * away**2 + 0.01 * seed,
            flops=int(budget / steps * (1 + 0.02 * (n == 8))),
        )  # fmt: skip


@needs("laws")
@pytest.mark.parametrize("size", ["model.depth", "model.d_model"])
def test_the_least_loss_at_equal_flops_is_found_inside(tmp_path: Path, size: str) -> None:
    study_of_budgets(tmp_path, size)
    chart = make_chart("iso_flop", tmp_path)
    minima = rows(chart, kind="minimum").set_index("series")
    assert minima["x"].to_dict() == pytest.approx({"1e+12 FLOPs": 6.0, "4e+12 FLOPs": 12.0})
    assert minima["y"].iloc[0] == pytest.approx(2.505)
    points = rows(chart, kind="point", series="1e+12 FLOPs")
    assert points["x"].tolist() == list(DEPTHS) and set(points["n"]) == {2}
    assert ("width" if size == "model.d_model" else "depth N") in caption(chart)


@needs("laws")
def test_the_label_of_a_loss_follows_the_drawn_runs(tmp_path: Path) -> None:
    study_of_budgets(tmp_path / "budgets")
    make_runs(
        tmp_path / "law", depth=(2, 4, 8, 16, 32), seed=(0, 1, 2),
        masked=lambda depth, seed: 1.5 + (1 + 0.01 * seed) / depth,
    )  # fmt: skip
    for path in (tmp_path / "budgets", tmp_path / "law"):
        make_run(path, depth=8, lr=1, masked=None, state="interrupted")
    for name, study in (
        ("iso_flop", "budgets"),
        ("loss_vs_compute", "budgets"),
        ("law_fit", "law"),
    ):
        chart = make_chart(name, tmp_path / study)
        assert chart.figure.axes[0].get_ylabel() == "validation loss on [MASK] (nats)"


@needs("laws")
def test_loss_against_flops_has_a_line_for_each_depth(tmp_path: Path) -> None:
    study_of_budgets(tmp_path)
    chart = make_chart("loss_vs_compute", tmp_path)
    middle = rows(chart, series="DeepNorm, N = 8")
    assert middle["x"].tolist() == pytest.approx([1.02e12, 4.08e12])
    bent = 0.1 * math.log(8 / least(4e12)) ** 2
    assert middle["y"].iloc[1] == pytest.approx(2.505 - 0.2 * math.log10(4) + bent)
    assert len(chart.data) == 6


@needs("laws")
def test_a_budget_has_the_loss_of_the_seeds_that_did_not_diverge(tmp_path: Path) -> None:
    runs = (10, "done", 2.0), (40, "done", 1.5), (40, "diverged", 9.0), (160, "diverged", 9.0)
    for steps, state, loss in runs:
        make_run(
            tmp_path, steps=steps, seed=int(state == "diverged"), lr=1e-3 * steps,
            state=state, masked=loss, flops=10**11,
        )  # fmt: skip
    line = rows(make_chart("loss_vs_compute", tmp_path))
    assert line["x"].tolist() == [1e12, 4e12] and line["y"].tolist() == [2.0, 1.5]


# --- the use of depth ------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed, used in ((0, 0.5), (1, 1.0)):
        for depth in (4, 16):
            path = make_run(tmp_path / "s", depth=depth, seed=seed)
            write_analyses(RunFolder(path), depth, used)
    return tmp_path / "s"


@needs("depth_use")
def test_effective_depth_has_mean_and_spread_over_seeds(runs: Path) -> None:
    chart = make_chart("effective_depth_vs_depth", runs)
    points = rows(chart, panel="layers", kind="point")
    # KL falls from 1 to 0 over half and over all of N layers, so it is below 1/2 after N/4 and N/2
    expected = {4: (2.5, np.std([2, 3], ddof=1)), 16: (7.0, np.std([5, 9], ddof=1))}
    for _, row in points.iterrows():
        mean, deviation = expected[int(row["x"])]
        assert (row["y"], row["n"]) == (mean, 2)
        assert row["high"] - row["y"] == pytest.approx(deviation)
    ratio = rows(chart, panel="share of the depth", kind="point")
    assert ratio["y"].tolist() == [2.5 / 4, 7.0 / 16]
    assert "all layers" in " ".join(words(chart))


@needs("depth_use")
def test_a_setting_that_learnt_nothing_is_marked(tmp_path: Path) -> None:
    for scheme, masked in (("pre_ln", 2.5), ("post_ln", 3.26)):
        for depth in (6, 12):
            path = make_run(tmp_path / "s", scheme=scheme, depth=depth, masked=masked)
            write_analyses(RunFolder(path), depth)
    path = make_run(tmp_path / "s", scheme="deepnorm", depth=6, state="diverged")
    write_analyses(RunFolder(path), 6)
    chart = make_chart("effective_depth_vs_depth", tmp_path / "s")
    points = rows(chart, panel="layers", kind="point")
    marks = {(row["series"], row["mark"]) for _, row in points.fillna("").iterrows()}
    assert marks == {("Pre-LN", ""), ("Post-LN", "at_chance"), ("DeepNorm", "diverged")}
    assert "no seed learnt: at chance or worse" in words(chart)


@needs("depth_use")
def test_the_lens_is_drawn_against_the_share_of_layers(runs: Path) -> None:
    chart = make_chart("lens_by_layer", runs)
    drawn = rows(chart, panel="KL to the final output", series="N = 4")
    assert drawn["x"].tolist() == [0, 0.25, 0.5, 0.75]  # on its logarithmic axis
    assert drawn["y"].tolist() == pytest.approx([1, (0.5 + 0.75) / 2, 0.25, 0.125])
    assert drawn["n"].tolist() == [2] * 4
    assert "KL is 0 at l = N" in caption(chart) and "at or below 0" in caption(chart)


@needs("depth_use")
def test_heat_maps_have_the_cells_of_one_seed(runs: Path) -> None:
    cells = rows(make_chart("effects", runs), panel="N = 4", kind="cell")
    known = cells.dropna(subset="value").set_index(["x", "y"])["value"]
    assert len(cells) == 16 and len(known) == 6  # later layers
    assert known[1, 3] == pytest.approx(np.exp(-2 / 5))
    cells = rows(make_chart("layer_similarity", runs), panel="N = 4", kind="cell")
    similar = cells.set_index(["x", "y"])["value"]
    assert len(similar) == 25 and similar[0, 4] == pytest.approx(np.exp(-1))
    assert (similar.xs(3)[3], similar[2, 1]) == (1.0, similar[1, 2])


# --- gradient ratios -------------------------------------------------------------------------


def test_gradient_ratios_are_means_over_seeds(tmp_path: Path) -> None:
    ln, rc, crossing = np.random.default_rng(0).uniform(0.5, 2, (3, 2, 2, 4))  # seed, step, layer
    crossing[:, :, :2] = np.nan  # cross-attention is the decoder's alone
    for path in make_runs(tmp_path, scheme=("post_ln", "pre_ln"), depth=4, seed=(0, 1)):
        run = Run(path)
        kinds = {"ln_feed_forward": ln, "rc_feed_forward": rc, "ln_cross_attention": crossing}
        if run.get("model.scheme") == "post_ln":
            kinds["ln_predicted_feed_forward"] = rc
        values = {f"beta_{name}": each[run.get("seed")] for name, each in kinds.items()}
        RunFolder(path).write_layers(values, [1, 5])
    chart = make_chart("gradient_ratios", tmp_path)
    for symbol, values in {"β_LN": ln, "β_RC": rc, "β_LN·β_RC": ln * rc}.items():
        for record, step in enumerate((1, 5)):
            found = rows(chart, panel=f"Post-LN: {symbol}", series=f"feed-forward, step {step}")
            mean, deviation = values[:, record].mean(axis=0), values[:, record].std(axis=0, ddof=1)
            assert found["x"].tolist() == [1, 2, 3, 4] and set(found["n"]) == {2}
            assert found["y"].to_numpy() == pytest.approx(mean)
            assert found["high"].to_numpy() == pytest.approx(mean + deviation)
    assert set(rows(chart, series="cross-attention, step 1")["x"]) == {3, 4}
    predicted = rows(chart, kind="predicted")
    assert set(predicted["panel"]) == {"Post-LN: β_LN"}
    assert predicted["y"].to_numpy() == pytest.approx(rc[:, 0].mean(axis=0))
    published = rows(chart, kind="reference", panel="Post-LN: β_LN")
    assert sorted(published["y"]) == [0.82, 0.86]
    assert any("n = 2" in text for text in words(chart))


def test_layers_that_no_gradient_reaches_are_left_out(tmp_path: Path) -> None:
    """0/0, and infinite ratios because one of them is 0; a warning would be an error."""
    layers = np.ones((2, 6))
    layers[1, :3] = np.nan, np.inf, 0.0
    make_run(tmp_path, layers=layers)
    chart = make_chart("gradient_ratios", tmp_path)
    assert rows(chart, series="attention, step 2")["x"].unique().tolist() == [4, 5, 6]


@pytest.mark.slow(turn=46)
def test_charts_against_the_step_have_the_best_rate_of_each_setting(tmp_path: Path) -> None:
    study_of_rates(tmp_path, "deepnorm", 0.0)
    chart = make_chart("loss_vs_step", tmp_path)
    assert "each setting and depth at its best learning rate; --best none shows all" in caption(
        chart
    )
    best = set(chart.data["panel"].dropna()) if "panel" in chart.data else set()
    every = make_chart("loss_vs_step", tmp_path, rates="all")
    assert "--best none" not in caption(every)
    assert len(set(every.data["panel"])) > max(len(best), 1)
    (axes,) = make_chart("loss_vs_lr", tmp_path).figure.axes
    assert len(axes.get_xticks()) > 1 and set(axes.get_xticks()) <= set(RATES)


def test_a_loss_that_explodes_leaves_the_view_with_a_mark(tmp_path: Path) -> None:
    make_run(tmp_path, losses=[5.0, 4.0, 3.0, 3.0, 3.0], seed=0)
    make_run(tmp_path, losses=[5.0, 9.0, 90.0, 95.0, 99.0], seed=1, state="diverged")
    chart = make_chart("loss_vs_step", tmp_path)
    (axes,) = chart.figure.axes
    assert axes.get_ylim()[1] < 8 and axes.get_yscale() == "linear"
    assert "1 curve leaves the view" in caption(chart) and "leaves the view" in words(chart)
    assert chart.data["y"].max() == 99.0  # the table has it
    assert make_chart("loss_vs_step", tmp_path, y_scale="log").figure.axes[0].get_ylim()[1] > 99


def test_a_step_without_gradients_is_not_in_the_legend(tmp_path: Path) -> None:
    nan = math.nan
    make_run(tmp_path, depth=3, layers=np.array([[nan, nan, nan], [1.0, nan, 4.0]]))
    chart = make_chart("grad_norm_by_layer", tmp_path)
    assert set(chart.data["series"]) == {"step 2"} and "step 1" not in words(chart)
    assert "no gradient is known at step 1" in caption(chart)
    assert "left out: 1 value not finite" in caption(chart)
