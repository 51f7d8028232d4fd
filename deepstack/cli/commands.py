"""The commands: each module describes its own with `@command`, and the application finds it.

The descriptions are read from the source: `deepstack --help` imports no command, and any other call
imports one.
"""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from deepstack.base.extensions import PACKAGE, extension_files, module_name
from deepstack.cli.declarations import parsed, registrations, value_of

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


def command(heading: str, example: str, place: int = LAST) -> Callable[[F], F]:
    """Decorate the function NAME_command: `deepstack NAME` calls it.

    The arguments are read from the source, so they must be constants.
    """
    assert heading in HEADINGS, heading
    return lambda function: function


def find_commands() -> dict[str, Described]:
    """Return every command by its name, in the order of the help.

    A command is the file NAME_command.py of this package or of an addition.
    """
    files = [*sorted((PACKAGE / "cli").glob("*_command.py")), *extension_files("*_command")]
    found = [one for path in files for one in described_in(module_name(path))]
    found.sort(key=lambda one: (HEADINGS.index(one.heading), one.place, one.name))
    return {one.name.removesuffix("_command"): one for one in found}


def described_in(module: str) -> list[Described]:
    """Return the commands that a module describes."""
    tree = parsed(module)
    return [
        described(module, node, call)
        for node in (tree.body if tree else [])
        for call in registrations(node, "command")
    ]


def described(module: str, function: Any, call: Any) -> Described:
    """Return the description of a function with the decorator `call`."""
    text = inspect.cleandoc(ast.get_docstring(function, clean=False) or "")
    summary = " ".join(text.split("\n\n")[0].split())
    arguments = [value_of(one, {}) for one in call.args]
    keywords = {str(one.arg): value_of(one.value, {}) for one in call.keywords}
    return Described(module, function.name, summary, *arguments, **keywords)
