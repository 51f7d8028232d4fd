"""The examples of a user's own trainer, and the page that shows them."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from helpers import ROOT
from helpers.command_line import succeed, typed

from deepstack.records import find_runs, problems
from deepstack.tools.own_trainer.study_file import load_commands
from deepstack.tools.own_trainer.verdict import BETTER, NOT_BETTER, UNDECIDED

EXAMPLES = ROOT / "examples" / "own_trainer"
PAGE = (ROOT / "docs/own_trainer.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_study_of_the_examples_can_be_read(path: Path) -> None:
    assert load_commands(path).study.size >= 6


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs without the probe, and one with it, from the folder above examples/."""
    monkeypatch.chdir(tmp_path)
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    monkeypatch.setenv("PATH", programs)  # as in an activated environment
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    trainer = tmp_path / "examples/own_trainer/train.py"
    trainer.write_text(trainer.read_text().replace("= 100, 10, 25", "= 50, 10, 25"))
    folder = "examples/own_trainer"
    succeed("sweep", f"{folder}/study.yaml", "depth=2", "lr=1e-3,3e-3", "seed=0", "--workers", 2)
    runs = find_runs("results/study")
    assert {run.state for run in runs} == {"done"} and len(runs) == 2
    for run in runs:
        assert run.evals["step"].tolist() == [0, 25, 50]
        assert run.evals["loss"].iloc[-1] < run.evals["loss"].iloc[0] - 1
        assert run.steps["step"].tolist() == list(range(0, 51, 5))
    succeed("sweep", f"{folder}/probe.yaml", "depth=2", "seed=0")
    (run,) = find_runs("results/probe")
    assert run.state == "done" and problems(run.folder) == []
    assert len(run.steps) == 51 and run.steps["model_update"].iloc[-1] > 0
    assert run.get("model.d_model") == 32 and run.get("model.depth") == 2
    assert run.layers("stream_norm")[1].shape[1] == 2
    assert "update_vs_step" in succeed("plot", "update_vs_step", "results/probe")


def test_the_study_files_of_the_page_are_those_of_the_examples() -> None:
    blocks = re.findall(r'```yaml title="(\w+\.yaml)"\n(.*?)```', PAGE, re.DOTALL)
    assert [name for name, _ in blocks] == ["study.yaml", "change.yaml"]
    for name, text in blocks:
        shown = yaml.safe_load(
            text.replace("python train.py", "python examples/own_trainer/train.py")
        )
        there = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
        assert shown.items() <= there.items(), name


def test_the_exit_codes_of_the_page_are_those_of_the_program() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w[\w ]*?)[:;]", PAGE, re.MULTILINE)
    known = {str(BETTER): "better", str(NOT_BETTER): "not better", str(UNDECIDED): "undecided"}
    assert dict(rows) | {"3": "a run failed"} == known | {"3": "a run failed"}


def test_the_options_of_the_page_exist() -> None:
    shown = typed("sweep", "--help").stdout
    for line in PAGE.splitlines():
        if line.startswith("    deepstack sweep"):
            words = line.partition("#")[0].partition("&&")[0].split()
            assert all(word in shown for word in words if word.startswith("--")), line
