"""The chart of gradient ratios shows what the runs hold."""

from pathlib import Path

import numpy as np
import pytest
from helpers.plot_runs import make_chart, make_run, make_runs, rows, words

from deepstack.records import Run, RunFolder


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
