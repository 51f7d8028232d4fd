"""The commands: each module describes its own with `@command`, and the application finds it.

The descriptions stand in the index: `deepstack --help` imports no command, and any other call
imports one.  A file that the index does not know as it is is imported.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TypeVar

from deepstack.base.extensions import PACKAGE, ROOT, extension_files, module_name
from deepstack.cli import index

F = TypeVar("F", bound=Callable[..., None])

HEADINGS = ("Runs", "Results", "Tools")
"""The headings of `deepstack --help`, in their order."""
LAST = 100


@dataclass(frozen=True)
class Described:
    """A command as `deepstack --help` lists it.

    module: the full name of its module.
    name: the name of its function.
    summary: the first paragraph of the function's docstring, in one line.
    heading: one of HEADINGS.
    example: a line to type.
    place: commands of a heading are listed by this number, then by name.
    """

    module: str
    name: str
    summary: str
    heading: str
    example: str
    place: int = LAST

    @property
    def function(self) -> Callable[..., None]:
        """The function, whose parameters are the options; this imports its module."""
        function: Callable[..., None] = getattr(import_module(self.module), self.name)
        return function


_DESCRIBED: dict[tuple[str, str], Described] = {}  # of imported modules, by module and function


def command(heading: str, example: str, place: int = LAST) -> Callable[[F], F]:
    """Decorate the function NAME_command: `deepstack NAME` calls it."""
    assert heading in HEADINGS, heading

    def describe(function: F) -> F:
        paragraph = (inspect.getdoc(function) or "").split("\n\n")[0]
        summary = " ".join(paragraph.split())
        module, name = function.__module__, function.__name__
        _DESCRIBED[module, name] = Described(module, name, summary, heading, example, place)
        return function

    return describe


@cache
def find_commands() -> dict[str, Described]:
    """Return every command by its name, in the order of the help."""
    known: dict[str, list[Described]] = {}
    for entry in index.stored().entries:
        if entry.kind == index.COMMANDS:
            known.setdefault(entry.file, []).append(Described(**entry.row))
    found: list[Described] = []
    for file in command_files():
        found += known.get(file, []) if index.is_unchanged(file) else described_in(file)
    found.sort(key=lambda one: (HEADINGS.index(one.heading), one.place, one.name))
    return {one.name.removesuffix("_command"): one for one in found}


def command_files() -> list[str]:
    """Return the files NAME_command.py of this package and of the additions, below ROOT."""
    files = [*sorted((PACKAGE / "cli").glob("*_command.py")), *extension_files("*_command")]
    return [path.relative_to(ROOT).as_posix() for path in files]


def described_in(file: str) -> list[Described]:
    """Import the module in a file, and return the commands that it describes."""
    module = module_name(ROOT / file)
    import_module(module)
    return [one for one in _DESCRIBED.values() if one.module == module]
