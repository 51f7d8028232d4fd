"""Charts of what `deepstack analyze` finds, and of gradient ratios by layer."""

from pathlib import Path

import numpy as np
import pytest
from helpers.plot_runs import make_chart, make_run, make_runs, rows, words, write_analyses

from deepstack.records import Run, RunFolder

# --- the use of depth ------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed, used in ((0, 0.5), (1, 1.0)):
        for depth in (4, 16):
            path = make_run(tmp_path / "s", depth=depth, seed=seed)
            write_analyses(RunFolder(path), depth, used)
    return tmp_path / "s"


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


def test_the_lens_is_drawn_against_the_share_of_layers(runs: Path) -> None:
    drawn = rows(make_chart("lens_by_layer", runs), panel="KL to the final output", series="N = 4")
    assert drawn["x"].tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert drawn["y"].tolist() == pytest.approx([1, (0.5 + 0.75) / 2, 0.25, 0.125, 0])
    assert drawn["n"].tolist() == [2] * 5


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
    """0/0, and what is infinite because only one of them is 0; a warning would be an error."""
    layers = np.ones((2, 6))
    layers[1, :3] = np.nan, np.inf, 0.0
    make_run(tmp_path, layers=layers)
    chart = make_chart("gradient_ratios", tmp_path)
    assert rows(chart, series="attention, step 2")["x"].unique().tolist() == [4, 5, 6]
