"""The structure of the package: imports point downwards, and no file is too long."""

import ast
import subprocess
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from helpers import ROOT, TESTS

PACKAGE = ROOT / "deepstack"

# A package imports only from the levels above its own line.
BASE = "allowed ending errors gc_control notebook registry options plugins torchrun"
LEVELS = (
    tuple(BASE.split()),
    ("yaml_reader",),
    ("config",),
    ("records", "parameters"),
    ("distributed", "schemes", "tasks", "analysis"),
    ("model", "plots"),
    ("fast", "reports", "trackers"),
    ("diagnostics",),
    ("training",),
    ("theory", "sweeps", "depth_use"),
    ("cli",),
)
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
NEEDS_NO_TORCH = ("config", "records", "analysis", "plots", "reports", "trackers")


@cache
def imports_of(path: Path) -> list[str]:
    """Return the full name of every imported module or object, also of imports in functions."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_packages_import_only_from_lower_levels() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if package in ("__init__", "__main__"):
            continue
        for name in imports_of(path):
            other = name.split(".")[1] if name.startswith("deepstack.") else package
            at_the_base = LEVEL[package] == LEVEL[other] == 0
            if other != package and LEVEL[other] >= LEVEL[package] and not at_the_base:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
            if package in NEEDS_NO_TORCH and name.split(".")[0] == "torch":
                wrong.append(f"{path.relative_to(ROOT)} imports torch")
    assert wrong == []


def test_files_have_at_most_400_lines() -> None:
    files = (*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py"))
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: length for path, length in lengths.items() if length > 400} == {}


def test_benchmarks_import_existing_names() -> None:
    """No other test runs the scripts in benchmarks/."""
    missing = []
    for path in sorted((ROOT / "benchmarks").rglob("*.py")):
        for name in imports_of(path):
            module, _, attribute = name.rpartition(".")
            if module.split(".")[0] == "deepstack":
                if not hasattr(import_module(module), attribute) and not find_spec(name):
                    missing.append(f"{path.name}: {name}")
    assert missing == []


def test_analysis_and_plots_import_neither_torch_nor_a_display() -> None:
    code = (
        "import sys, pkgutil, importlib, deepstack.analysis as a\n"
        "for m in pkgutil.iter_modules(a.__path__, 'deepstack.analysis.'):\n"
        "    importlib.import_module(m.name)\n"
        "print({'torch', 'matplotlib'} & set(sys.modules))\n"
        "import deepstack.plots\n"
        "print({'torch', 'matplotlib.pyplot'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert printed.stdout == "set()\nset()\n"
