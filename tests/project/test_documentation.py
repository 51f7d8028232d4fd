"""The README, tutorials, examples and files around the package: their commands and code work."""

import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT
from helpers.command_line import TINY, succeed, typed
from helpers.extensions import COMMANDS, has, is_missing, needs, needs_command

import deepstack
from deepstack.cli.commands import find_commands
from deepstack.records import Run, find_runs

README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = "".join(
    path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/extending/*.md"))
)
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
KEPT = "docs/figures/terminal.svg"
PLACES = ("*.md", "docs/**/*.md", "benchmarks/*.md", "experiments/*/*.md")
PAGES = [path for place in PLACES for path in sorted(ROOT.glob(place))]
USED = [line for line in LINES if line.startswith("deepstack ") and "--plugin" not in line]


def test_the_readme_is_short_and_has_the_documented_commands() -> None:
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


def test_the_badges_of_the_readme_are_true() -> None:
    sys.path.insert(0, str(ROOT / "docs_site"))
    badges = import_module("badges").badges()
    assert all(path.read_text(encoding="utf-8") == text for path, text in badges.items())
    assert all(f"docs/figures/{path.name}" in README for path in badges)


@pytest.mark.slow
def test_the_recording_of_a_terminal_is_made_by_its_script(tmp_path: Path) -> None:
    picture, script = tmp_path / "terminal.svg", ROOT / "docs_site/terminal.py"
    subprocess.run([sys.executable, script, "--to", picture], check=True)
    made, kept = picture.read_text(encoding="utf-8"), (ROOT / KEPT).read_text(encoding="utf-8")
    assert "http" not in made.replace("http://www.w3.org/2000/svg", "")
    words = set(re.findall(r"[a-z_]{3,}", kept.partition("</style>")[2]))
    assert "validation" in words and words <= set(re.findall(r"[a-z_]{3,}", made))


def test_the_readme_lists_commands_below_the_headings_of_the_help() -> None:
    listed: dict[str, list[str]] = {}
    for line in README.partition("lists them:\n\n")[2].partition("\n\n")[0].splitlines():
        if line.startswith("    # "):
            listed[line[6:]] = []
        else:
            listed[list(listed)[-1]].append(line.split()[1])
    assert list(listed) == ["Runs", "Results", "Tools"]
    for heading, commands in listed.items():
        there = [one for one in commands if one not in COMMANDS or has(COMMANDS[one])]
        assert {find_commands()[command].heading for command in there} == {heading}


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


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=needs_command(line.split()[1:2])) for line in USED]
)
def test_every_command_shown_is_one_that_is_understood(line: str) -> None:
    command, *words = shlex.split(line)[1:]
    assert command in find_commands()
    shown = typed(command, "--help").stdout
    assert all(word in shown for word in words if word.startswith("--"))
    configs = [ROOT / word for word in words if word.startswith("configs/")]
    assert all(config.is_file() for config in configs)
    if command == "train" and "--extend" not in words and not re.search("/path/|/RUN ", line):
        config = ROOT / "configs" / Path(words[0]).with_suffix(".yaml").name
        overrides = [word for word in words[1:] if "=" in word]
        succeed("check", config, *overrides, "model.depth=6")


def test_the_snippet_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    exec(snippet.replace("depth=12", "depth=2").replace("steps=20", "steps=2"), {})
    assert "model_update" in capsys.readouterr().out and len(find_runs("results/readme")) == 2


@needs("probe")
def test_the_calls_named_in_the_text_can_be_made() -> None:
    """`deepstack.probe(…)` as it is written, without an argument that is missing or unknown."""
    calls = re.findall(r"`deepstack\.probe(\(.*?\))`", README, re.DOTALL)
    assert calls
    for call in calls:
        made: Any = ast.parse(f"probe{call}", mode="eval").body
        keywords = {keyword.arg: keyword.value for keyword in made.keywords}
        inspect.signature(deepstack.probe).bind(*made.args, **keywords)


def test_contributing_and_the_changelog_are_short() -> None:
    assert (ROOT / "CONTRIBUTING.md").stat().st_size <= 5000
    assert (ROOT / "CHANGELOG.md").stat().st_size <= 14_000


def test_the_imports_and_calls_of_the_recipes_work() -> None:
    """Each imported name exists, and each call in the text has the arguments of its function."""
    index = (ROOT / "docs/extending/index.md").read_text(encoding="utf-8")
    (imports,) = re.findall(r"```python\n(.*?)```", index, re.DOTALL)
    names: dict[str, Any] = {}
    exec(imports, names)
    calls = re.findall(r"\b(Task|Source|Chart)\(([a-z_, ]+)\)", RECIPES)
    assert {name for name, _ in calls} == {"Task", "Source", "Chart"}
    for name, arguments in calls:
        parameters = list(inspect.signature(names[name]).parameters)
        assert parameters[: len(arguments.split(", "))] == arguments.split(", ")
    (start,) = re.findall(r"`(parameter\(.*?\))`", RECIPES)
    made = eval(start, names | {"d_model": 8})
    assert made.shape == (8,) and made.start == 0.5


def test_every_name_that_code_on_a_page_imports_exists() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    lines = re.findall(r"^ *from (deepstack[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)
    wanted = {(module, name) for module, names in lines for name in names.split(", ")}
    assert len(wanted) > 20
    assert [(at, name) for at, name in wanted if not hasattr(import_module(at), name)] == []


@pytest.mark.parametrize(
    "page", ["CONTRIBUTING.md", "docs/extending/index.md"], ids=["map", "recipes"]
)
def test_every_place_that_a_page_on_contributing_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    places = re.findall(r"`((?:deepstack|tests|docs|benchmarks|configs)/[^`<*]*)`", text)
    assert places and all((ROOT / place).exists() for place in places), places
    packages = {path.parent.name for path in ROOT.glob("deepstack/*/__init__.py")}
    if page == "CONTRIBUTING.md":
        listed = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
        assert listed | {"instruments", "tools", "integrations"} == packages


def test_the_table_of_schemes_is_the_codes() -> None:
    table = typed("list", "schemes", "--markdown").stdout.strip()
    assert table in (ROOT / "docs" / "schemes.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    """And none into results/, where every command that is shown would write over it."""
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        name = path.relative_to(ROOT).as_posix()
        is_generated = name.startswith("reference/")  # by the site
        assert path.exists() or is_generated or is_missing(path), target
        assert "results" not in path.parts or name == "results/README.md", target


def test_each_figure_of_the_gallery_has_a_question_and_one_sentence() -> None:
    lines = (ROOT / "docs_site/gallery.txt").read_text("utf-8").splitlines()
    pictures = [line.partition(": ")[0] for line in lines]
    assert len(set(pictures)) == len(lines) > 10
    for picture, line in zip(pictures, lines, strict=True):
        page = ROOT / picture
        assert page.is_file() and page.parents[1].joinpath("README.md").is_file(), picture
        sentence = line.removeprefix(f"{picture}: ")
        assert re.fullmatch(r"[A-Z].{30,180}\.", sentence) and ". " not in sentence, sentence


# --- the package's name, version, extras and workflow ---------------------------------------------


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_package_has_its_own_name_one_version_and_every_extra_that_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "deepstack-studies" and "version" in project["dynamic"]
    assert project["scripts"] == {"deepstack": "deepstack.cli:main"}
    assert load("CITATION.cff")["version"] == deepstack.__version__
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deepstack/**/*.py")):
        for extras in re.findall(r"'?\.\[([a-z,]+)\]'", path.read_text(encoding="utf-8")):
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), path


def test_the_lowest_versions_are_those_that_are_tested_and_documented() -> None:
    """.ci/run installs requirements/minimum.txt, all but torch, and runs the fast tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    allowed = dict(line.split(">=") for line in project["dependencies"])
    lines = (ROOT / "requirements/minimum.txt").read_text(encoding="utf-8").splitlines()
    assert dict(line.split("==") for line in lines if line[0] != "#") == allowed
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert 'stage "minimum versions" minimum' in script and "requirements/minimum.txt" in script
    page = (ROOT / "docs/installation.md").read_text(encoding="utf-8")
    assert all(f"{name} {version}" in page for name, version in allowed.items())


def test_the_image_has_the_compiler_and_the_kernels() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    compiler = re.search(r"^RUN apt-get update && apt-get install -y .*\bg\+\+", text, re.MULTILINE)
    kernels = re.search(r"^RUN deepstack check quick .*runtime\.replay=native$", text, re.MULTILINE)
    installed = text.index("pip install --no-cache-dir --no-deps .")
    assert compiler and kernels and compiler.start() < installed < kernels.start()


def test_the_workflow_calls_the_script_and_issue_templates_are_forms() -> None:
    steps = load(".github/workflows/ci.yml")["jobs"]["ci"]["steps"]
    assert steps[-1]["run"].split()[0] == ".ci/run"
    assert "mkdocs build --strict" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    for name in ("bug", "scheme"):
        assert {"name", "description", "body"} <= {*load(f".github/ISSUE_TEMPLATE/{name}.yml")}


# --- tutorials and examples: their files work, and so do the commands beside them -----------------


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


@pytest.mark.slow(turn=12)
@needs("probe")
def test_the_model_of_a_tutorial_is_measured(files: Path) -> None:
    code = (files / "my_model.py").read_text().replace("range(20)", "range(3)")
    exec(compile(code, "my_model.py", "exec"), {})
    (run,) = find_runs("results/mine")
    assert run.state == "done" and len(run.steps) == 3 and (run.steps.model_update > 0).all()


# --- examples/first_study.ipynb -------------------------------------------------------------------


NOTEBOOK = ROOT / "examples" / "first_study.ipynb"


MAKE_OUTPUTS = "DEEPSTACK_WRITE_NOTEBOOK"
"""The variable with which test_the_notebook_runs stores the outputs in the notebook."""


def lasting(outputs: Any) -> list[Any]:
    """Return the outputs of a cell without progress and notes on the machine."""
    return [
        one
        for one in outputs
        if "<progress" not in str(one.get("data", ""))
        and not str(one.get("text", "")).startswith("steps are ")
    ]


def shapes_of(notebook: Any) -> list[list[str]]:
    """Return the kinds of the lasting outputs of each cell of code."""
    return [
        [
            f"{one.output_type} {' '.join(sorted(one.get('data', {})))}"
            for one in lasting(cell.outputs)
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the notebook's own libraries
def test_the_notebook_runs_and_has_the_outputs_that_it_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last digits of numbers depend on the processor, so words and kinds are compared."""
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    stored = nbformat.read(NOTEBOOK, as_version=4)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    sentence = "DeepNorm learns at every depth; Post-LN learns at N = 6 and not at N = 48"
    assert sentence in text and "would give an interval" in text
    assert "results/first_study/report.html" in text
    if os.environ.get(MAKE_OUTPUTS):
        write_outputs(notebook)
        stored = notebook
    assert sentence in NOTEBOOK.read_text(encoding="utf-8")
    assert shapes_of(stored) == shapes_of(notebook)


def write_outputs(notebook: Any) -> None:
    """Store the outputs in the notebook, without progress, times and the identifiers of cells."""
    import nbformat

    for number, cell in enumerate(notebook.cells):
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = lasting(cell.outputs)
            for one in cell.outputs:
                if "execution_count" in one:
                    one.execution_count = None
        cell.id = f"cell-{number}"
    nbformat.write(notebook, NOTEBOOK)


def test_the_notebook_is_kept_with_figures_and_without_progress() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert '"image/png"' in text and "<progress" not in text and "/tmp/" not in text


# --- examples/optuna_study.py ---------------------------------------------------------------------


@pytest.mark.slow
def test_the_optuna_search_finds_the_best_of_its_runs(tmp_path: Path) -> None:
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
