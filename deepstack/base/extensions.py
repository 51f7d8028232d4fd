"""Finds what instruments, tools, integrations and the laboratory add, by the names of their files.

A folder in one of HOMES adds a chart in chart.py, a command in <command>_command.py, a measurement
in measure.py, a launcher of runs in launcher.py, and so on.  The core imports the files of a kind
when it needs them.  A folder that is deleted is not missed, nor is a home.
"""

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

    Each stands in the dict PUBLIC of the folder's `__init__.py`, which imports nothing.
    """
    packages = import_files(path.parent for path in extension_files("__init__"))
    return {
        name: (f"{package.__name__}.{module}", attribute)
        for package in packages
        for name, (module, attribute) in vars(package).get("PUBLIC", {}).items()
    }
