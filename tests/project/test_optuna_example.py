"""examples/optuna_study.py: the best trial is the best run."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.command_line import TINY

from deepstack.records import Run, find_runs


@pytest.mark.slow
def test_the_search_finds_the_best_of_its_runs(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs the extra [optuna]")
    command = [sys.executable, str(ROOT / "examples" / "optuna_study.py"), *map(str, TINY)]
    printed = []
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        printed.append(done.stdout)
    assert printed[0] == printed[1]  # the second time from finished runs
    runs = find_runs(tmp_path / "results" / "optuna")
    assert 1 < len(runs) <= 12
    best = min(
        (run for run in runs if run.state == "done"), key=lambda run: run.evals.loss.iloc[-1]
    )
    path = tmp_path / printed[0].split()[-1]
    assert Run(path).evals.loss.iloc[-1] == best.evals.loss.iloc[-1]
    assert best.get("model.scheme") in printed[0]
