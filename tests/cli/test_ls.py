"""`deepstack ls`: the outcome of each run, and the command that continues an interrupted one."""

import json
import re
import shlex
from pathlib import Path

import pytest
from helpers import QUICK
from helpers.command_line import TINY, succeed, typed
from helpers.plot_runs import make_run

import deepstack
from deepstack.base.errors import Interrupted
from deepstack.config import load_config
from deepstack.records import Run, find_runs


def test_ls_shows_outcomes(tmp_path: Path) -> None:
    make_run(tmp_path / "study", seed=0, masked=2.5)
    make_run(tmp_path / "study", seed=1, masked=3.26)
    make_run(tmp_path / "study", seed=2, state="diverged")
    make_run(tmp_path / "study", seed=3, state="failed")
    damaged = make_run(tmp_path / "study", seed=4)
    (damaged / "evals.csv").write_text("step,loss,loss_masked\n0,1,x\n")
    shown = typed("ls", tmp_path)
    lines = [re.split(r" {2,}", line.strip()) for line in shown.stdout.splitlines()]
    assert [line[2:4] for line in lines if line[0] == "study" and "-s" in line[1]] == [
        ["done", "learnt"], ["done", "at chance"], ["diverged", "diverged"], ["failed", "-"],
        ["damaged", "-"],
    ]  # fmt: skip
    rows = json.loads(succeed("ls", tmp_path, "--json"))
    assert [row["outcome"] for row in rows] == ["trained", "stalled", "diverged", None, None]
    chosen = json.loads(succeed("ls", tmp_path, "--json", "--where", "outcome=learnt"))
    assert [row["run"] for row in chosen] == [rows[0]["run"]]


@pytest.mark.usefixtures("warm_server")
def test_ls_gives_the_command_that_continues_interrupted_runs(tmp_path: Path) -> None:
    for seed in (0, 1):
        settings = load_config(QUICK, [*TINY, "train.steps=4", f"seed={seed}"])
        try:
            deepstack.train(settings, study="study", out=tmp_path, stop=lambda: 2)  # Ctrl-C
        except Interrupted:
            pass
    runs = find_runs(tmp_path)
    assert [run.state for run in runs] == ["interrupted", "interrupted"]
    shown = typed("ls", tmp_path)
    (command,) = (line for line in shown.stderr.splitlines() if "to continue" in line)
    program, *words = shlex.split(command.partition(": ")[2])
    assert program == "deepstack"
    succeed(*words, "--workers", "1")
    assert [run.path for run in find_runs(tmp_path)] == [run.path for run in runs]
    assert [(Run(run.path).state, run.folder.last_row()["step"]) for run in runs] == [
        ("done", "4"), ("done", "4"),
    ]  # fmt: skip
    assert "to continue" not in typed("ls", tmp_path).stderr
