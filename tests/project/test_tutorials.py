"""The files that the tutorials show work, and so do the commands beside them."""

import re
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.command_line import TINY, succeed

from deepstack.records import find_runs


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with every file that a tutorial shows."""
    monkeypatch.chdir(tmp_path)
    for page in ROOT.glob("docs/tutorials/*.md"):
        text = page.read_text(encoding="utf-8")
        for name, code in re.findall(r'```python title="(.*?)"\n(.*?)```', text, re.DOTALL):
            (tmp_path / name).write_text(code, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["model.scheme=damped", "model.scheme_options.power=0.25", "--plugin", "my_scheme.py"],
        ["task.name=majority", "--plugin", "my_task.py"],
    ],
    ids=["scheme", "task"],
)
def test_a_plugin_of_a_tutorial_trains(words: list[str], files: Path) -> None:
    succeed("train", "quick", *TINY, *words, "-q")
    assert [run.state for run in find_runs("results")] == ["done"]


def test_the_model_of_a_tutorial_is_measured(files: Path) -> None:
    code = (files / "my_model.py").read_text().replace("range(20)", "range(3)")
    exec(compile(code, "my_model.py", "exec"), {})
    (run,) = find_runs("results/mine")
    assert run.state == "done" and len(run.steps) == 3 and (run.steps.model_update > 0).all()
