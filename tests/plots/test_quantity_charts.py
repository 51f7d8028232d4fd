"""Charts `metric` and `map` of any quantity, and the tidy table that they draw."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import refusal
from helpers.plot_runs import (
    caption,
    make_run,
    make_runs,
    rows,
    without_layout,
)
from matplotlib.collections import QuadMesh

from deepstack.base.errors import ConfigError, NothingMatchedError
from deepstack.plots import Options
from deepstack.plots.metric import metric, value_map
from deepstack.records import find_runs
from deepstack.runs import tidy
from deepstack.runs.comparison import compare
from deepstack.runs.tidy import seed_statistics

# --- any quantity ----------------------------------------------------------------------------


def draw(root: Path, *words: str, at_step: int | None = None, **more: Any) -> Any:
    with without_layout():
        return metric(find_runs(root), *words, options=Options(at_step=at_step), **more)


def test_a_column_against_a_setting_has_mean_and_deviation_over_seeds(tmp_path: Path) -> None:
    make_runs(
        tmp_path, scheme=("deepnorm", "post_ln"), depth=(6, 18), seed=(0, 1, 2),
        masked=lambda scheme, depth, seed: (scheme == "post_ln") + depth / 10 + 0.1 * seed,
    )  # fmt: skip
    make_runs(tmp_path, depth=(6, 18), seed=9, state="diverged", masked=11.0)
    make_runs(tmp_path, depth=(6, 18), seed=8, state="interrupted", masked=5.0)
    chart = draw(tmp_path, "depth", "val_loss_masked", "scheme")
    for series, of_scheme in (("DeepNorm", [0.7, 1.9]), ("Post-LN", [1.7, 2.9])):
        found = rows(chart, series=series)
        assert found["x"].tolist() == [6, 18] and found["y"].tolist() == pytest.approx(of_scheme)
        assert (found["high"] - found["y"]).tolist() == pytest.approx([0.1, 0.1])
        assert found["n"].tolist() == [3, 3]
    assert "last value of each run, without 2 unfinished runs" in caption(chart)
    assert "left out of the means: 2 diverged runs" in caption(chart)


def test_other_settings_make_panels_and_are_not_averaged(tmp_path: Path) -> None:
    make_runs(tmp_path, scheme=("deepnorm", "post_ln"), depth=(6, 18), lr=(1e-3, 2e-3), seed=(0, 1))
    chart = draw(tmp_path, "lr", "model_update")
    assert list(dict.fromkeys(chart.data["panel"])) == ["N = 6", "N = 18"]
    assert set(chart.data["series"]) == {"DeepNorm", "Post-LN"} and set(chart.data["n"]) == {2}
    chart = draw(tmp_path, "lr", "model_update", "depth")
    assert list(dict.fromkeys(chart.data["panel"])) == ["DeepNorm", "Post-LN"]
    assert set(chart.data["series"]) == {"N = 6", "N = 18"}


def test_a_quantity_against_step_layer_and_another_column(tmp_path: Path) -> None:
    layers = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 9.0]])
    make_run(tmp_path, depth=3, layers=layers, losses=[4.0, 3.0, 2.0], steps=3)
    for at_step, x, y, values in (
        (None, "step", "loss", [4, 3, 2]),
        (None, "layer", "grad_norm", [2, 4, 9]),
        (1, "layer", "grad_norm", [1, 2, 3]),
    ):
        assert draw(tmp_path, x, y, at_step=at_step).data["y"].tolist() == values
    for reduction, value in (("mean", 5.0), ("max", 9.0), ("last", 9.0), (2, 4.0)):
        chart = draw(tmp_path, "step", "grad_norm", layers=reduction)
        assert chart.data["y"].tolist()[-1] == value
    both = draw(tmp_path, "loss", "model_update").data
    assert both["x"].tolist() == [4.0, 3.0, 2.0] and both["y"].is_monotonic_increasing


def test_only_curves_against_the_step_are_smoothed(tmp_path: Path) -> None:
    make_runs(tmp_path, depth=(6, 18, 48), losses=[4.0, 3.0, 0.5], steps=3)
    runs = find_runs(tmp_path)
    with without_layout():
        curve = metric(runs[:1], "step", "loss", options=Options(smooth=3))
        others = [metric(runs, x, "loss", options=Options(smooth=3)) for x in ("depth", "flops")]
    assert curve.data["y"].tolist() == [3.5, 2.5, 1.75] and "mean over 3 rows" in caption(curve)
    assert others[0].data["y"].tolist() == [0.5] * 3
    assert others[1].data["y"].tolist() == [4.0, 3.0, 0.5] * 3


def test_flops_are_a_column(tmp_path: Path) -> None:
    make_runs(tmp_path, seed=(0, 1), losses=[4.0, 3.0, 2.0], steps=3, flops=10**9)
    make_run(tmp_path, depth=18, losses=[4.0, 3.0, 2.0], steps=3, flops=None)  # of an older version
    chart = draw(tmp_path, "flops", "loss", "depth")
    assert chart.data[["x", "y"]].to_numpy().tolist() == [[1e9, 4.0], [2e9, 3.0], [3e9, 2.0]]
    assert "training FLOPs" in caption(chart)
    known, unknown = compare(tmp_path)["flops"]
    assert known == 3e9 and math.isnan(unknown)


def test_names_that_are_not_known_are_answered_with_the_nearest(tmp_path: Path) -> None:
    make_runs(tmp_path, depth=(6, 18))
    with pytest.raises(ConfigError, match="did you mean 'val_loss'"):
        draw(tmp_path, "depth", "val_los")

    with pytest.raises(NothingMatchedError, match="has no value of single layers"):
        draw(tmp_path, "layer", "loss")


def test_a_map_shows_the_mean_of_each_cell_and_marks_diverged_ones(tmp_path: Path) -> None:
    make_runs(
        tmp_path, depth=(6, 18), lr=(1e-3, 1e-2), seed=(0, 1),
        masked=lambda depth, lr, seed: depth / 10 + 100 * lr + 0.2 * seed,
        state=lambda depth, lr, seed: "diverged" if (depth, lr) == (18, 1e-2) else "done",
    )  # fmt: skip
    chart = value_map(find_runs(tmp_path), "depth", "lr", "val_loss_masked", options=Options())
    cells = chart.data.set_index(["x", "y"])
    assert cells.loc[(6, 1e-2), "value"] == pytest.approx(1.7)
    assert cells.loc[(6, 1e-2), "high"] == pytest.approx(1.7 + 0.2 / math.sqrt(2))
    assert cells["mark"].dropna().to_dict() == {(18, 1e-2): "diverged"}
    (mesh,) = chart.figure.axes[0].findobj(QuadMesh)
    drawn = np.ma.filled(np.ma.masked_invalid(mesh.get_array()), np.nan).reshape(2, 2)
    assert drawn[:, 0].tolist() == pytest.approx([0.8, 1.7]) and math.isnan(drawn[1, 1])


def test_the_command_refuses_options_of_other_charts(tmp_path: Path) -> None:
    make_run(tmp_path)
    for command, message in (
        ("metric --x depth", "plot metric: needs --y; as in: deepstack plot metric DIR"),
        ("map --x depth --y lr", "plot map: needs --value"),
        ("map --x depth --y lr --value loss --by lr", "has no --by"),
        ("outcomes --x depth", "plot outcomes: has no --x"),
    ):
        assert message in " ".join(refusal(2, "plot", *command.split(), tmp_path).split())


# --- the tidy table --------------------------------------------------------------------------


def test_a_row_has_scheme_depth_seed_step_value_and_the_settings_that_vary(tmp_path: Path) -> None:
    for scheme, roles in (("deepnorm", ["v"]), ("post_ln", ["v", "w1"])):
        config = {"train.trainable": roles}  # a list is one value
        make_runs(tmp_path / "study", scheme=scheme, seed=(0, 1), steps=3, config=config)
    runs = find_runs(tmp_path)
    table = tidy(runs, "model_update")
    assert len(table) == 4 * 3
    assert set(table) == {"scheme", "depth", "seed", "step", "value", "train.trainable"}
    last = table[(table["scheme"] == "post_ln") & (table["seed"] == 1) & (table["step"] == 3)]
    (run,) = [r for r in runs if r.get("model.scheme") == "post_ln" and r.get("seed") == 1]
    assert last["value"].item() == run.steps["model_update"].iloc[-1]
    assert last["train.trainable"].item() == ["v", "w1"]
    empty = tidy(runs, "no_such_column")
    assert empty.empty and set(empty) >= {"scheme", "depth", "seed", "step", "value"}
    assert seed_statistics(empty).empty


def test_statistics_leave_out_what_is_not_finite() -> None:
    table = pd.DataFrame({"step": [1, 1, 2, 2], "value": [1.0, 3.0, 5.0, math.inf]})
    first, second = seed_statistics(table).to_dict("records")
    low, high = 2 - math.sqrt(2), 2 + math.sqrt(2)
    assert first == pytest.approx({"x": 1, "y": 2, "low": low, "high": high, "n": 2})
    assert (second["x"], second["y"], second["n"]) == (2, 5, 1) and math.isnan(second["low"])
