"""The house: a room imports only from rooms below it, and no file grows too long."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "deepstack"

FLOORS = [
    {"ending", "errors", "gc_control", "interrupts", "registry", "options", "plugins"},
    {"yaml_reader"},
    {"config", "records", "parameters"},
    {"distributed", "schemes", "tasks", "analysis"},
    {"model", "plots"},
    {"fast", "reports"},
    {"diagnostics"},
    {"training"},
    {"theory", "sweeps", "bench"},
    {"cli"},
]
FLOOR = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Rooms of deepstack that a file imports, inside functions too; for annotations as well."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [node.module]
            if node.module == "deepstack":
                names = [f"deepstack.{alias.name}" for alias in node.names]
        else:
            continue
        rooms |= {n.split(".")[1] for n in names if n.startswith("deepstack.")}
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_from_rooms_below(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    for other in imported_rooms(path) - {room}:
        both_at_the_base = FLOOR[room] == FLOOR[other] == 0
        assert FLOOR[other] < FLOOR[room] or both_at_the_base, f"{room} imports {other}"


@pytest.mark.parametrize(
    "path", [*FILES, *Path(__file__).parent.glob("*.py")], ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_no_file_over_400_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize(
    "path", sorted((PACKAGE.parent / "benchmarks").glob("*.py")), ids=lambda p: p.name
)
def test_a_benchmark_imports_what_is_there(path: Path) -> None:
    """Nothing runs most of them but a person, long after a name has moved."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepstack"):
            module = import_module(node.module or "")
            for alias in node.names:
                there = hasattr(module, alias.name) or find_spec(f"{node.module}.{alias.name}")
                assert there, f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("room", ["config", "records", "analysis", "plots", "reports"])
def test_these_rooms_need_no_torch(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not any(n.split(".")[0] == "torch" for n in [*names, module]), path


def test_analysis_needs_no_matplotlib() -> None:
    code = (
        "import sys, pkgutil, importlib, deepstack.analysis as a\n"
        "for m in pkgutil.iter_modules(a.__path__, 'deepstack.analysis.'):\n"
        "    importlib.import_module(m.name)\n"
        "print({'torch', 'matplotlib'} & set(sys.modules))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert printed.stdout == "set()\n"
