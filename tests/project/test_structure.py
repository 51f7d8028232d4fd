"""The structure of the package: imports point downwards, and no file is too long."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import ROOT, TESTS, extensions
from helpers.extensions import ADDITIONS, MAY_IMPORT, has, needs

from deepstack.base.extensions import HOMES, public_names

PACKAGE = ROOT / "deepstack"

# Within the core a package imports only from packages above it in this list.
CORE = (
    "base", "config", "records", "runs", "schemes", "tasks", "model", "fast", "diagnostics",
    "training", "sweeps", "plots", "cli",
)  # fmt: skip
OUTSIDE = ("instruments", "tools", "integrations")
LAB = ROOT / "deepstack_lab"
NO_TORCH = ("config", "records", "runs", "plots")
# The additions that the core still imports.  This list may only shrink.
TO_MEND: set[str] = set()
# Pairs of modules of a package that import each other.  This list may only shrink.
CIRCLES_TO_MEND: set[frozenset[str]] = set()
UPWARD_TO_MEND: set[str] = set()


@cache
def names_in(path: Path) -> tuple[list[str], list[str]]:
    """Return the imported names and the strings of a file."""
    names: list[str] = []
    strings: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node.value)
    return names, strings


def imports_of(path: Path) -> list[str]:
    """Return the full name of every imported module or object, also of imports in functions."""
    return names_in(path)[0]


def sources(*places: str) -> list[Path]:
    """Return the Python files in these packages of deepstack, in all of it without any."""
    return sorted(file for place in places or [""] for file in (PACKAGE / place).rglob("*.py"))


def module_of(path: Path) -> str:
    """Return the full name of the module in a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


LAB_FILES = sorted(LAB.rglob("*.py"))
MODULES = {module_of(path): path for path in (*sources(), *LAB_FILES)}


@cache
def imported_modules(path: Path) -> set[str]:
    """Return the modules of deepstack that a file imports, also in functions and by string."""
    modules = set()
    for name in imports_of(path) + names_in_strings(path):
        while name.startswith("deepstack") and name not in MODULES:
            name = name.rpartition(".")[0]
        modules.add(name)
    return {name for name in modules if "." in name and name in MODULES} - {module_of(path)}


def names_in_strings(path: Path) -> list[str]:
    """Return the strings of a file that are the name of a module of deepstack."""
    return [text for text in names_in(path)[1] if text in MODULES]


def package_of(module: str) -> str:
    top, _, rest = module.partition(".")
    return rest.split(".")[0] if top == "deepstack" else top


def test_the_packages_equal_the_list() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == {*CORE, *OUTSIDE}
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_the_default_tests_are_all_but_those_of_the_laboratory() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["pytest"]["ini_options"]["testpaths"]
    found = {path.parent.relative_to(ROOT) for path in TESTS.glob("**/test_*.py")}
    assert {*listed, "tests/lab"} == {"/".join(path.parts[:2]) for path in found}


def test_a_core_package_imports_only_from_those_above_it() -> None:
    wrong = {
        f"{module} imports {name}".replace("deepstack.", "")
        for module, path in MODULES.items()
        if module.count(".") and package_of(module) in CORE
        for name in imported_modules(path)
        if package_of(name) in CORE
        if CORE.index(package_of(name)) > CORE.index(package_of(module))
    }
    assert wrong == UPWARD_TO_MEND


def test_the_core_imports_nothing_from_outside() -> None:
    wrong = set()
    for path in sources(*CORE):
        text = path.relative_to(ROOT).as_posix()
        for name in imported_modules(path):
            if package_of(name) in (*OUTSIDE, LAB.name):
                wrong.add(f"{text} imports {'.'.join(name.split('.')[:3])}")
    assert wrong == TO_MEND


def test_nothing_imports_the_laboratory() -> None:
    wrong = [path for path in sources() for name in imported_modules(path) if LAB.name in name]
    assert wrong == []


def test_an_addition_imports_of_others_only_what_the_list_allows() -> None:
    wrong = []
    indexes = [PACKAGE / home / "__init__.py" for home in OUTSIDE]
    for path in sources(*OUTSIDE):
        if path in indexes:  # see test_a_type_checker_knows_the_public_names
            continue
        own = path.relative_to(PACKAGE).parts[1]
        for name in imported_modules(path):
            other = (*name.split("."), "", "")[2]
            allowed = {own, *MAY_IMPORT.get(own, ())}
            if package_of(name) in OUTSIDE and other and other not in allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_a_tool_or_instrument_names_its_question_and_the_page_that_asks_it() -> None:
    homes = (PACKAGE / "instruments", PACKAGE / "tools", LAB)
    for path in [path for home in homes for path in home.glob("*/__init__.py")]:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        asked = re.search(r"^Question: .+\?\s+Asked in: (\S+)$", text, re.MULTILINE)
        assert asked and (ROOT / asked[1]).is_file(), path


def test_the_tests_know_every_addition() -> None:
    """Else `needs` of a new folder would be refused as a slip."""
    homes = {path.parent.name for home in HOMES for path in ROOT.glob(f"{home}/*/__init__.py")}
    assert homes <= ADDITIONS


@needs("signal")
def test_a_file_of_tests_that_imports_a_missing_addition_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extensions, "has", lambda name: name != "transfer")
    assert extensions.imports_missing(TESTS / "tools/test_coverage.py")
    assert extensions.imports_missing(TESTS / "tools/test_one_judge.py")  # by answer
    assert not extensions.imports_missing(TESTS / "tools/signal/test_signals.py")


def test_a_type_checker_knows_the_public_names() -> None:
    found = {}
    for home in [home for home in OUTSIDE if (PACKAGE / home).is_dir()]:
        tree = ast.parse((PACKAGE / home / "__init__.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module != "typing":
                found |= {each.asname: (node.module, each.name) for each in node.names}
    there = {name: origin for name, origin in found.items() if has(str(origin[0]).split(".")[2])}
    assert there == {
        name: origin for name, origin in public_names().items() if has(origin[0].split(".")[2])
    }


def test_no_two_modules_of_a_package_import_each_other() -> None:
    graph = {
        module: {
            name
            for name in imported_modules(path)
            if package_of(name) == package_of(module) and MODULES[name].name != "__init__.py"
        }
        for module, path in MODULES.items()
        if module.count(".") and path.name != "__init__.py"
    }

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            if (name := todo.pop()) not in seen:
                seen.add(name)
                todo += graph[name]
        return seen

    reach = {module: reached(module) for module in graph}
    circles = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in graph
        if module in reach[module]
    }
    short = {frozenset(name.removeprefix("deepstack.") for name in each) for each in circles}
    assert short == CIRCLES_TO_MEND


def test_packages_that_need_no_torch_import_none() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources(*NO_TORCH)
        if any(name.split(".")[0] == "torch" for name in imports_of(path))
    ]
    assert wrong == []


def test_files_have_at_most_400_lines() -> None:
    files = (*PACKAGE.rglob("*.py"), *LAB_FILES, *TESTS.rglob("*.py"))
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
        "import sys, pkgutil, importlib, deepstack\n"
        "dir(deepstack)  # imports the folders of additions\n"
        "import deepstack.runs as a\n"
        "for m in pkgutil.iter_modules(a.__path__, 'deepstack.runs.'):\n"
        "    importlib.import_module(m.name)\n"
        "print({'torch', 'matplotlib'} & set(sys.modules))\n"
        "import deepstack.plots\n"
        "print({'torch', 'matplotlib.pyplot'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert printed.stdout == "set()\nset()\n"
