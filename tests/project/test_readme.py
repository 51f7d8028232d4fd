"""The README: its commands exist, its snippet runs, its table is the code's."""

import ast
import inspect
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from helpers.command_line import succeed, typed

import deepstack
from deepstack.cli.app import COMMANDS
from deepstack.records import find_runs

README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PAGES_OF_USE = [
    *(ROOT / name for name in ("README.md", "docs/schemes.md", "docs/runs.md", "docs/speed.md")),
    *sorted(ROOT.glob("docs/tutorials/*.md")),
]
LINES = [
    line.split("#")[0].strip()
    for page in PAGES_OF_USE
    for line in page.read_text(encoding="utf-8").splitlines()
    if line.startswith("    ")
]
PLACES = ("*.md", "docs/**/*.md", "benchmarks/*.md", "experiments/*/*.md")
PAGES = [path for place in PLACES for path in sorted(ROOT.glob(place))]
USED = [line for line in LINES if line.startswith("deepstack ") and "--plugin" not in line]


def test_it_is_short_and_its_commands_stand_there_to_the_letter() -> None:
    lines = README.splitlines()
    assert len(lines) <= 130 and USED[0] == "deepstack train configs/quick.yaml"
    for command in (
        "train configs/deepnorm_1000.yaml",
        "sweep --depths 6,48,200,1000",
        "plot results/",
    ):
        assert f"    deepstack {command}" in lines
    install, test = (line for line in LINES if line.startswith("python3 -m venv"))
    assert install.endswith("-e . && . .venv/bin/activate") and test.endswith("pytest")
    assert "-c constraints.txt" in install and "-c constraints.txt" in test


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_git_ignores_what_the_commands_write() -> None:
    ignored = ["results/quick/run/steps.csv", "results/report.html", "deepstack.schema.json"]
    kept = ["results/README.md", "results/published/study/run/steps.csv"]
    command = ["git", "check-ignore", "--no-index", *ignored, *kept]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.splitlines() == ignored


def test_a_user_gets_no_package_of_another_project() -> None:
    """Another project has the name deepstack on the package index."""
    pattern = re.compile(r"pip install ['\"]?deepstack\b(?!-studies)")
    for place in ("deepstack/**/*.py", "deepstack/**/*.html", "*.md", "docs/**/*.md"):
        for path in ROOT.glob(place):
            assert not pattern.search(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("line", USED)
def test_every_command_shown_is_one_that_is_understood(line: str) -> None:
    command, *words = shlex.split(line)[1:]
    assert command in COMMANDS
    shown = typed(command, "--help").stdout
    assert all(word in shown for word in words if word.startswith("--"))
    configs = [ROOT / word for word in words if word.startswith("configs/")]
    assert all(config.is_file() for config in configs)
    if command == "train" and "--extend" not in words and "/path/" not in line:
        config = ROOT / "configs" / Path(words[0]).with_suffix(".yaml").name
        overrides = [word for word in words[1:] if "=" in word]
        succeed("check", config, *overrides, "model.depth=6")


def test_the_snippet_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    exec(snippet.replace("depth=12", "depth=2").replace("steps=20", "steps=2"), {})
    assert "model_update" in capsys.readouterr().out and len(find_runs("results/readme")) == 2


def test_the_calls_named_in_the_text_can_be_made() -> None:
    """`deepstack.probe(…)` as it is written, without an argument that is missing or unknown."""
    calls = re.findall(r"`deepstack\.probe(\(.*?\))`", README, re.DOTALL)
    assert calls
    for call in calls:
        made: Any = ast.parse(f"probe{call}", mode="eval").body
        keywords = {keyword.arg: keyword.value for keyword in made.keywords}
        inspect.signature(deepstack.probe).bind(*made.args, **keywords)


def test_a_plugin_begins_as_the_recipes_say() -> None:
    """What they import is there, and what they make of it has these arguments."""
    (imports,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING, re.DOTALL)
    there: dict[str, Any] = {}
    exec(imports, there)
    for name, arguments in re.findall(r"`(Task|Source|Chart)\((.*?)\)`", CONTRIBUTING):
        assert list(inspect.signature(there[name]).parameters)[: len(arguments.split(", "))] == (
            arguments.split(", ")
        )
    (start,) = re.findall(r"`(parameter\(.*?\))`", CONTRIBUTING)
    made = eval(start, there | {"d_model": 8})
    assert made.shape == (8,) and made.start == 0.5


def test_the_table_of_schemes_is_the_codes() -> None:
    table = typed("list", "schemes", "--markdown").stdout.strip()
    assert table in (ROOT / "docs" / "schemes.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    """And none into results/, where every command that is shown would write over it."""
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        name = path.relative_to(ROOT).as_posix()
        assert path.exists() or name.startswith("reference/"), target  # the site generates these
        assert "results" not in path.parts or name == "results/README.md", target
