"""Derived numbers: bits of an evaluation, a run's row, a plan's last row, times of an export."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.small_runs import small

import deepstack
from deepstack.cli.sweep_output import plan_rows
from deepstack.config import Study
from deepstack.sweeps import plan


def test_an_evaluation_in_bits_is_its_loss_over_ln_2(tmp_path: Path) -> None:
    evals = deepstack.train(small(), out=tmp_path).evals
    assert len(evals) > 2
    assert evals["bits_per_token"].tolist() == pytest.approx(
        [loss / math.log(2) for loss in evals["loss"]]
    )


def test_a_plan_ends_with_the_memory_and_time_of_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the largest runs that go together, and the time with all workers busy."""
    monkeypatch.setattr("deepstack.cli.sweep_output.seconds_per_run", lambda cells: [60, 120, 180])
    study = Study(small(), {"seed": [0, 1, 2]})
    cells = [
        replace(cell, memory=megabytes * 10**6)
        for cell, megabytes in zip(
            plan(study, study="study", out=tmp_path), (300, 500, 400), strict=True
        )
    ]
    *_, last = plan_rows(study, cells, workers=2)
    assert (last["memory_mb"], last["minutes"], last["steps"]) == (900, 3.0, 36)
