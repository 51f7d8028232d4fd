"""Every instrument, tool, integration and the laboratory can be deleted: the rest still works."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, TESTS
from helpers.command_line import TINY
from helpers.sampling import FAST, ROTATION

from deepstack.base.extensions import HOMES

FOLDERS = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for home in HOMES
    for path in ROOT.glob(f"{home}/*/__init__.py")
)
DOTTED = [name.replace("/", ".") for name in FOLDERS]
ALL = "all"  # of the folders at once
ORDER = sorted(FOLDERS, key=lambda name: (FOLDERS.index(name) - ROTATION) % len(FOLDERS))
"""The folders; each commit begins with another one: the default tests, the slow ones go on."""

# Each place is tried by a new process, in which torch is imported already.
PROGRAM = """
import os, sys
import matplotlib.pyplot, pandas, pydantic, rich.console, torch, typer

def check(place):
    os.chdir(place)
    sys.path.insert(0, place)
    import deepstack
    from deepstack.base.extensions import PACKAGE, import_extensions
    from deepstack.cli import app

    assert str(PACKAGE).startswith(place), PACKAGE
    from deepstack.cli.listing import listings

    kinds = "chart", "tracker", "compare_table", "sweep_option", "launcher_option", "token_reader"
    kinds += ("study_kind",)
    for kind in kinds:
        import_extensions(kind)
    run(app, ["--help"])
    for kind in listings():
        run(app, ["list", kind])
        run(app, ["list", kind, "--json"])
    run(app, ["train", *sys.argv[1].split(), "-q"])
    run(app, ["compare", "results"])

def run(app, words):
    try:
        app(words)
    except SystemExit as end:
        assert not end.code, (words, end.code)

for place in sys.argv[2:]:
    sys.stdout.flush()
    if child := os.fork():
        assert not os.waitpid(child, 0)[1], place
    else:
        try:
            check(place)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
"""


def without(folder: str, place: Path) -> Path:
    """Make a folder that has the package by links, but for the deleted folder."""
    for path in [ROOT / "deepstack", *(ROOT / home for home in HOMES if (ROOT / home).is_dir())]:
        (place / path.relative_to(ROOT)).mkdir(parents=True)
        for child in path.iterdir():
            name = child.relative_to(ROOT).as_posix()
            is_deleted = name == folder or (folder == ALL and name in FOLDERS)
            if not is_deleted and name not in HOMES and child.name != "__pycache__":
                (place / name).symlink_to(child)
    return place


def check_folders(folders: list[str], place: Path) -> None:
    places = [without(name, place / name.replace("/", "-")) for name in folders]
    tiny = "quick " + " ".join(TINY)
    command = [sys.executable, "-c", PROGRAM, tiny, *map(str, places)]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow(turn=2)
def test_the_core_works_without_all_folders(tmp_path: Path) -> None:
    check_folders([ALL], tmp_path)


@pytest.mark.slow
def test_the_core_works_without_some_folder(tmp_path: Path) -> None:
    check_folders(ORDER[: len(ORDER) // 6], tmp_path)


@pytest.mark.full
def test_the_core_works_without_any_other_folder(tmp_path: Path) -> None:
    check_folders(ORDER[len(ORDER) // 6 :], tmp_path)


@pytest.mark.slow(turn=36)
def test_no_module_of_the_fast_tests_imports_a_folder_that_can_be_deleted() -> None:
    """Their functions do, behind `pytest.importorskip`."""
    files = [path for place in FAST for path in (TESTS / place, *(TESTS / place).rglob("*.py"))]
    for path in [path for path in files if path.is_file()]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            module = node.module if isinstance(node, ast.ImportFrom) else ""
            assert not any(f"{module}.".startswith(f"{name}.") for name in DOTTED), path


@pytest.mark.full
@pytest.mark.parametrize("folder", ORDER)
def test_the_fast_tests_pass_without_a_folder(folder: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "results", "site", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=hidden, symlinks=True)
    shutil.copytree(ROOT / "results/published", copy / "results/published")
    shutil.rmtree(copy / folder)
    tests = folder.removeprefix("deepstack").strip("/_")  # lab/ledger, tools/answer
    shutil.rmtree(copy / "tests" / tests, ignore_errors=True)
    words = ["-m", "fast", "-n", "0", "-q", "-x", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *words, *(f"tests/{place}" for place in FAST)]
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-4000:]
