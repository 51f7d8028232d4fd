"""The last row of a plan."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.small_runs import small

from deepstack.cli.sweep_output import plan_rows
from deepstack.config import Study
from deepstack.sweeps import plan


def test_a_plan_ends_with_the_memory_and_time_of_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of the largest runs that go together, and the time with all workers busy."""
    monkeypatch.setattr("deepstack.cli.sweep_output.seconds_per_run", lambda cells: [60, 120, 180])
    study = Study(small(), {"seed": [0, 1, 2]})
    cells = plan(study, study="study", out=tmp_path)
    sizes = zip(cells, (3e8, 5e8, 4e8), strict=True)
    *_, last = plan_rows(study, [replace(cell, memory=int(m)) for cell, m in sizes], workers=2)
    assert (last["memory_mb"], last["minutes"], last["steps"]) == (900, 3.0, 36)
