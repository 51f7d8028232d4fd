"""A package of the core shows others the names of its `__init__`, and nothing else."""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from helpers import ROOT
from project.test_structure import CORE, LAB, OUTSIDE, PACKAGE, imports_of, module_of, sources

from deepstack import cli

PLACES = [*(PACKAGE / name for name in OUTSIDE), LAB, ROOT / "experiments", ROOT / "benchmarks"]
OUTSIDERS = sorted(path for place in PLACES for path in place.rglob("*.py"))
# Names that Python code of users needs (docs/plugins.md and docs/extending), or a test.
FOR_USERS = {
    "cli": {"app"},
    "config": {"config_hash", "parse_study"},
    "diagnostics": {"Diagnostic", "SublayerStatistics"},
    "fast": {"CapturedStep", "ReplayedStep", "Update", "choose_fast_paths", "compiled"},
    "model": {"Activation", "AttentionSublayer", "FeedForwardSublayer", "Layer"},
    "plots": {"figure"},
    "runs": {"tidy"},
    "schemes": {"FAMILIES", "Norm", "Place", "parameter"},
    "sweeps": {"expand"},
    "tasks": {"build_task", "task"},
    "training": {"AfterWarmup", "Optimizer", "Parent", "Schedule", "observer"},
}


@cache
def face(package: str) -> dict[str, str]:
    """Return the names that a package shows, and the module of each: lines `import X as X`."""
    tree = ast.parse((PACKAGE / package / "__init__.py").read_text(encoding="utf-8"))
    return {
        each.asname: str(node.module)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for each in node.names
        if each.asname
    }


def core_names(path: Path) -> list[tuple[str, str]]:
    """Return (package, rest of the dotted name) of everything that a file imports of the core."""
    found = []
    for name in imports_of(path):
        top, _, rest = name.partition(".")
        package, _, rest = rest.partition(".")
        if top == "deepstack" and package in CORE and rest:
            found.append((package, rest))
    return found


@cache
def used_names(path: Path) -> set[tuple[str, str]]:
    """Return the names of faces that a file uses: imported, or as attributes of the package."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    packages = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "deepstack":
            packages |= {each.asname or each.name: each.name for each in node.names}
    attributes = {
        (packages.get(node.value.id, ""), node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return {(package, rest) for package, rest in core_names(path)} | attributes


def test_outsiders_import_faces_only() -> None:
    inside = {
        f"{path.relative_to(ROOT)}: {package}.{rest}"
        for path in OUTSIDERS
        for package, rest in core_names(path)
        if rest not in face(package)
    }
    assert inside == set(), "add the name to the package's __init__, or do without it"


@pytest.mark.parametrize("package", CORE)
def test_a_face_shows_what_others_use(package: str) -> None:
    others = [path for path in sources() if module_of(path).split(".")[1:2] != [package]]
    used = {
        name for path in (*others, *OUTSIDERS) for one, name in used_names(path) if one == package
    }
    assert set(face(package)) - used == FOR_USERS.get(package, set())


@pytest.mark.parametrize("package", CORE)
def test_a_face_shows_the_names_of_its_modules(package: str) -> None:
    for name, module in face(package).items():
        shown = __import__(f"deepstack.{package}", fromlist=[name])
        assert getattr(shown, name) is getattr(import_module(module), name)


def test_the_face_of_the_commands_is_listed_twice_alike() -> None:
    loaded = {name for names in cli._NAMES.values() for name in names}
    assert loaded | {"Command", "app", "main", "options", "reported_errors"} == set(face("cli"))
