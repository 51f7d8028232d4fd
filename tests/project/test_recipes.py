"""The complete files in docs/extending: each works in a copy of the package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT
from helpers.command_line import TINY
from helpers.extensions import needs
from helpers.plot_runs import make_runs
from helpers.record_runs import make_run

# page -> the place of its file in the package
FILES = {
    "chart": "instruments/last_norm/chart.py",
    "command": "tools/size/size_command.py",
    "launcher": "integrations/alone/launcher_option.py",
    "integration": "integrations/lines/tracker.py",
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package, to which the files of all pages are added."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copytree(
        ROOT / "deepstack", folder / "deepstack", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "configs").symlink_to(ROOT / "configs")
    for page, place in FILES.items():
        text = (ROOT / "docs" / "extending" / f"{page}.md").read_text(encoding="utf-8")
        (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        path = folder / "deepstack" / place
        path.parent.mkdir()
        (path.parent / "__init__.py").write_text('"""A recipe."""\n')
        path.write_text(code)
    make_run(folder / "results" / "study" / "run")
    return folder


def run(copy: Path, *words: str) -> str:
    """Return the output of a command of the copy."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(copy), *sys.path])}
    command = [sys.executable, "-m", "deepstack", *words]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_of_the_recipe_is_listed_and_runs(copy: Path) -> None:
    assert "size" in run(copy, "--help").partition("Results:")[2].partition("Tools:")[0]
    (printed,) = json.loads(run(copy, "size", "results/study/run", "--json"))
    assert printed["files"] == 3 and printed["bytes"] > 100


@pytest.mark.slow
def test_the_chart_of_the_recipe_is_drawn_by_an_instrument_and_by_a_plugin(
    copy: Path, tmp_path: Path
) -> None:
    make_runs(copy / "results" / "sizes", depth=(6, 18), scheme=("deepnorm", "pre_ln"))
    name, words = "last_grad_norm_vs_depth", ("--format", "csv", "--to", str(tmp_path))
    run(copy, "plot", name, "results/sizes", *words)
    drawn = (tmp_path / f"{name}.csv").read_text()
    assert drawn.startswith("series,kind,x,y,n\nDeepNorm,point,6,1,1\nDeepNorm,point,18,1,1\n")
    file = tmp_path / "my_chart.py"
    shutil.copy(copy / "deepstack" / FILES["chart"], file)
    run(ROOT, "plot", name, str(copy / "results/sizes"), "--plugin", str(file), *words)
    assert (tmp_path / f"{name}.csv").read_text() == drawn


@needs("export")
def test_the_tracker_of_the_recipe_exports_logs(copy: Path) -> None:
    run(copy, "export", "results/study/run", "--logs", "lines", "--to", "logs")
    assert (copy / "logs" / "run.txt").read_text().startswith("1 3.0\n2 2.0\n")


@pytest.mark.slow
def test_the_launcher_of_the_recipe_trains_the_runs_of_a_sweep(copy: Path) -> None:
    run(copy, "sweep", "quick", "--depths", "2,3", *TINY[1:], "--alone", "-q")
    states = [
        json.loads(path.read_text())["state"] for path in copy.glob("results/quick/*/status.json")
    ]
    assert states == ["done", "done"]
