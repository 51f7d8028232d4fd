"""The records of one command: its name, its files at another start, and a probe that it uses."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster_results import until
from helpers.command_line import typed
from helpers.extensions import needs
from helpers.plot_runs import make_run

from deepstack.config import yaml_of
from deepstack.records import Run, RunFolder
from deepstack.tools.own_trainer.cells import plan_cells
from deepstack.tools.own_trainer.processes import below, signal_all
from deepstack.tools.own_trainer.record import begin, columns_of, config_of, end
from deepstack.tools.own_trainer.study_file import load_commands

METRIC = {"pattern": "val ([0-9.]+)"}


def begun(path: Path, values: dict[str, Any], *, keep: bool = False) -> RunFolder:
    """The folder of a command that has begun and has printed one value of its metric."""
    folder = RunFolder(path)
    path.mkdir(parents=True, exist_ok=True)
    metrics = {"metric": METRIC, "loss": None}
    config = yaml_of(config_of("own", "own.py", {}, values))
    meta = {"created": "now", "git": {}, "trainer": metrics}
    begin(folder, config, meta, columns_of("own"), keep=keep)
    (path / "output.txt").write_text("val 2.5\n")
    return folder


def test_runs_of_other_variables_are_others(tmp_path: Path) -> None:
    text = "command: own.py {seed}\nmetric: 'val ([0-9.]+)'\nsweep: {grid: {seed: [1]}}\n"
    names = []
    for more in ("", "environment: {A: 1}\n", "environment: {A: 2}\n"):
        (tmp_path / "study.yaml").write_text(text + more)
        file = load_commands(tmp_path / "study.yaml")
        (cell,) = plan_cells(file, file.study, tmp_path)
        names.append((cell.folder.name, cell.config_text))
    for column in zip(*names, strict=True):
        assert len(set(column)) == 3, "compare would take two of them for one setting"


@pytest.mark.parametrize("keep", [False, True])
def test_a_command_that_goes_on_keeps_its_files_of_the_earlier_start(
    keep: bool, tmp_path: Path
) -> None:
    folder = begun(tmp_path / "run", {})
    checkpoint = folder.path / "files" / "checkpoint.pt"
    checkpoint.write_text("weights")
    begun(folder.path, {}, keep=keep)
    assert checkpoint.parent.is_dir() and checkpoint.exists() == keep


def test_a_probe_gives_the_settings_that_the_study_does_not(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", {"train.lr": 0.5, "seed": 3})
    make_run(folder.path / "files", depth=12, lr=1e-3, seed=1, d_ff=96)
    assert end(folder, 0) == ""
    run = Run(folder.path)
    settings = ("seed", "train.lr", "model.depth", "model.d_ff", "task.name")
    assert [run.get(key) for key in settings] == [3, 0.5, 12, 96, "text"]
    assert run.state == "done" and run.evals["loss"].tolist() == [2.5]


@pytest.mark.parametrize(("state", "end_state"), [("running", "failed"), ("done", "done")])
def test_a_probe_must_have_ended_before_its_command(
    state: str, end_state: str, tmp_path: Path
) -> None:
    folder = begun(tmp_path / "run", {})
    probe = make_run(folder.path / "files", state=state)
    why = end(folder, 0)
    assert Run(folder.path).state == end_state
    assert (f"the probe in {{run}}/{probe.name} is" in why) == (end_state == "failed"), why


def test_a_loss_of_the_probe_that_is_not_finite_has_diverged(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", {})
    make_run(folder.path / "files", losses=[3.0, 2.9, 2.8, 4.0, float("inf")], state="diverged")
    assert end(folder, 0) == ""
    assert Run(folder.path).state == "diverged"


def test_processes_below_those_of_a_command_are_found() -> None:
    """A shell in a shell, which waits for a third process."""
    inner = "sleep 60 & wait"
    with subprocess.Popen(["sh", "-c", f"sh -c '{inner}' & wait"]) as command:
        try:
            until(lambda: len(below(command.pid)) == 2, seconds=20)
            found = below(command.pid)
            assert command.pid in below(os.getpid())
        finally:
            signal_all([command.pid, *below(command.pid)], signal.SIGKILL)
    assert len(set(found)) == 2


@needs("answer", "report")
def test_a_study_without_losses_by_step_has_an_answer_and_charts(tmp_path: Path) -> None:
    for seed in range(3):
        assert end(begun(tmp_path / "own" / str(seed), {"seed": seed}), 0) == ""
    for command, codes in (("answer", [0]), ("report", [0]), ("plot", [0, 7])):  # 7: no chart
        done = typed(command, tmp_path / "own")
        assert done.exit_code in codes and "code has failed" not in done.stderr, done.output
        assert command != "answer" or "2.5" in done.stdout
    assert "At N = 0" not in (tmp_path / "own" / "report.html").read_text(encoding="utf-8")
