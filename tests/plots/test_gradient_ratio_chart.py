"""The chart of gradient ratios shows what the runs hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.plot_runs import make_chart, rows, words
from helpers.plot_runs import make_run as bare_run

import deepstack
from deepstack.config import Config, with_overrides

SMALL = {
    "model.family": "encoder_decoder", "model.depth": 2, "model.d_model": 16,
    "task.name": "reverse", "task.seq_len": 8, "train.steps": 3, "train.batch_size": 2,
    "train.eval_every": 0, "train.eval_batches": 1, "log.probe_sequences": 2,
}  # fmt: skip


def test_gradient_ratios_are_means_over_seeds(tmp_path: Path) -> None:
    runs = [
        deepstack.train(
            with_overrides(Config(), SMALL | {"model.scheme": scheme, "seed": seed}), out=tmp_path
        )
        for scheme in ("post_ln", "pre_ln")
        for seed in (0, 1)
    ]
    chart = make_chart("gradient_ratios", tmp_path)
    post = [run for run in runs if "post_ln" in run.name]
    ln, rc = (
        np.array([run.layers(f"{name}_attention")[1] for run in post]).astype(float)
        for name in ("beta_ln", "beta_rc")
    )
    panels = {"β_LN": ln, "β_RC": rc, "β_LN·β_RC": ln * rc}
    for symbol, values in panels.items():
        for record, step in ((0, 0), (-1, 3)):
            found = rows(
                chart, panel=f"Post-LN: {symbol}",
                series=f"attention, step {step}", kind="line",
            )  # fmt: skip
            assert list(found["x"]) == [1, 2, 3, 4] and set(found["n"]) == {2}
            mean = values[:, record].mean(axis=0)
            deviation = values[:, record].std(axis=0, ddof=1)
            assert list(found["y"]) == pytest.approx(list(mean))
            assert list(found["high"]) == pytest.approx(list(mean + deviation))
    # cross-attention is the decoder's alone; what Post-LN's analysis predicts is none of Pre-LN's
    crossing = rows(chart, series="cross-attention, step 0", kind="line")
    assert set(crossing["x"]) == {3, 4}
    predicted = rows(chart, kind="predicted")
    assert len(predicted) and predicted["panel"].str.startswith("Post-LN").all()
    published = rows(chart, kind="reference", panel="Post-LN: β_LN")
    assert sorted(published["y"]) == [0.82, 0.86]
    assert any("n = 2" in text for text in words(chart))


def test_layers_that_no_gradient_reaches_are_left_out(tmp_path: Path) -> None:
    """0/0, and what is infinite because only one of them is 0; a warning would be an error."""
    layers = np.ones((2, 6))
    layers[1, :3] = np.nan, np.inf, 0.0
    bare_run(tmp_path, layers=layers)
    chart = make_chart("gradient_ratios", tmp_path)
    assert rows(chart, series="attention, step 2")["x"].unique().tolist() == [4, 5, 6]
