"""A package of the core, and an addition, shows others the names of its `__init__` alone."""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from helpers import ROOT, extensions
from helpers.extensions import needs, works
from project.test_structure import CORE, LAB, OUTSIDE, PACKAGE, imports_of, module_of, sources

from deepstack.base.extensions import HOMES

PLACES = [*(PACKAGE / name for name in OUTSIDE), LAB, ROOT / "experiments", ROOT / "benchmarks"]
INDEXES = [PACKAGE / name / "__init__.py" for name in OUTSIDE]  # lists for type checkers
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


ADDITIONS = sorted(path.parent for home in HOMES for path in (ROOT / home).glob("*/__init__.py"))


@cache
def face(folder: Path) -> dict[str, str]:
    """Return the names that a package shows, and the module of each: lines `import X as X`."""
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
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
        if rest not in face(PACKAGE / package)
    }
    assert inside == set(), "add the name to the package's __init__, or do without it"


all_additions = needs(*sorted(extensions.ADDITIONS))  # a deleted folder uses no face


@all_additions
@pytest.mark.parametrize("package", CORE)
def test_a_face_shows_what_others_use(package: str) -> None:
    others = [path for path in sources() if module_of(path).split(".")[1:2] != [package]]
    used = {
        name for path in (*others, *OUTSIDERS) for one, name in used_names(path) if one == package
    }
    assert set(face(PACKAGE / package)) - used == FOR_USERS.get(package, set())


def names_for_others(addition: Path) -> set[str]:
    """Return the rest of the dotted names that files outside of an addition import of it."""
    start = f"{module_of(addition / '__init__.py')}."
    return {
        name.removeprefix(start)
        for path in OUTSIDERS
        if addition not in path.parents and path not in INDEXES
        for name in imports_of(path)
        if name.startswith(start)
    }


@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda folder: folder.name)
def test_others_take_the_names_of_an_addition_from_its_face(addition: Path) -> None:
    assert names_for_others(addition) <= set(face(addition)), "add the name to its __init__"


@all_additions
@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda folder: folder.name)
def test_the_face_of_an_addition_shows_what_others_use(addition: Path) -> None:
    assert set(face(addition)) <= names_for_others(addition)


@pytest.mark.parametrize(
    "folder",
    [*(PACKAGE / name for name in CORE), *(one for one in ADDITIONS if works(one.name))],
    ids=lambda folder: folder.name,
)
def test_a_face_shows_the_names_of_its_modules(folder: Path) -> None:
    package = module_of(folder / "__init__.py")
    for name, module in face(folder).items():
        shown = __import__(package, fromlist=[name])
        assert getattr(shown, name) is getattr(import_module(module), name)


@pytest.mark.parametrize("folder", [PACKAGE / "cli", *ADDITIONS], ids=lambda folder: folder.name)
def test_a_lazy_face_is_listed_twice_alike(folder: Path) -> None:
    """Once for type checkers, once with the modules to import."""
    package = module_of(folder / "__init__.py")
    names: dict[str, tuple[str, ...]] = getattr(import_module(package), "FACE", {})
    loaded = {f"{package}.{module}.{name}" for module in names for name in names[module]}
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    checked = {
        f"{node.module}.{each.name}"
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module != package
        for each in node.names
    }
    assert loaded == checked
