"""The tidy table of a quantity, and the statistics over seeds that charts draw from it."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest
from helpers.plot_runs import make_runs

from deepstack.analysis import tidy
from deepstack.analysis.tidy import seed_statistics
from deepstack.records import find_runs


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
