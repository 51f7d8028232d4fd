"""The times that a user waits for: phases of a run, and seconds of a sweep's runs."""

import os
from pathlib import Path

import pytest
from helpers.small_runs import small

import deepstack
from benchmarks import waits
from deepstack.training.run import TrainingRun


def test_phases_are_counted_and_add_up_to_the_run(tmp_path: Path) -> None:
    before = {name: getattr(TrainingRun, name) for name in waits.PHASES if name != "step"}
    rows = {one["phase"]: one for one in waits.phases(small(log__layers_every=4), tmp_path)}
    calls = {name: one["calls"] for name, one in rows.items()}
    assert calls["a step"] == 12 and calls["an evaluation"] == 4 == calls["a record of all layers"]
    whole = rows.pop("all but imports")["s in all"]
    assert sum(one["s in all"] for one in rows.values()) == pytest.approx(whole)
    assert all(one["s in all"] > 0 for one in rows.values())
    assert before == {name: getattr(TrainingRun, name) for name in before}, "left in place"


def test_a_run_of_a_sweep_takes_the_time_between_two_ends_of_its_worker(tmp_path: Path) -> None:
    runs = [deepstack.train(small(seed=seed), study="s", out=tmp_path) for seed in range(3)]
    for run, at in zip(runs, (100.0, 103.0, 104.5), strict=True):
        os.utime(run.folder.status_path, (at, at))
    rows = waits.sweep_rows(tmp_path / "s")
    assert [one["worker"] for one in rows] == [1, 1, 1]
    assert [one["s"] for one in rows] == [None, 3.0, 1.5]
    for one, run in zip(rows, runs, strict=True):
        assert one["steps, s"] == pytest.approx(run.timing["step_ms"].sum() / 1000)
    assert rows[1]["beside, s"] == pytest.approx(3.0 - rows[1]["steps, s"])
