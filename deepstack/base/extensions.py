"""Finds what instruments, tools, integrations and the laboratory add, by the names of their files.

A folder in one of HOMES adds a chart in chart.py, a command in <command>_command.py, a measurement
in measure.py, a launcher of runs in launcher.py, and so on.  The core imports the files of a kind
when it needs them.  A folder that is deleted is not missed, nor is a home.
"""

import ast
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "deepstack"
HOMES = ("deepstack/instruments", "deepstack/tools", "deepstack/integrations", "deepstack_lab")
"""Folders of ROOT with a folder for each addition."""


@cache
def extension_files(kind: str) -> tuple[Path, ...]:
    """Return the files `kind`.py of all additions; `kind` may be a pattern."""
    found = [path for home in HOMES for path in ROOT.glob(f"{home}/*/{kind}.py")]
    return tuple(sorted(found))


def module_name(path: Path) -> str:
    """Return the full name of the module in a file of deepstack."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def import_files(paths: Iterable[Path]) -> list[ModuleType]:
    """Import the modules in these files of deepstack, and return them."""
    return [import_module(module_name(path)) for path in paths]


def import_extensions(kind: str) -> list[ModuleType]:
    """Import the files of a kind, so that their definitions register themselves; return them."""
    return import_files(extension_files(kind))


@cache
def public_names() -> dict[str, tuple[str, str]]:
    """Return the names that additions give to `import deepstack`: name -> (module, attribute).

    Each stands in the dict PUBLIC of the folder's `__init__.py`, which is read, not imported.
    """
    return {
        name: (f"{module_name(path.parent)}.{module}", attribute)
        for path in extension_files("__init__")
        for name, (module, attribute) in _constant(path, "PUBLIC").items()
    }


def _constant(path: Path, name: str) -> dict[str, tuple[str, str]]:
    """Return the dict that a file assigns to a name, or an empty one."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return dict(ast.literal_eval(node.value))
    return {}
