"""The commands: each module describes its own with `@command`, and the application finds it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from deepstack.base.extensions import PACKAGE, extension_files, import_files

F = TypeVar("F", bound=Callable[..., None])

HEADINGS = ("Runs", "Results", "Instruments")
"""The headings of `deepstack --help`, in their order."""
LAST = 100


@dataclass(frozen=True)
class Described:
    """A command as `deepstack --help` lists it.

    function: its parameters are the options.  heading: one of HEADINGS.  example: a line to type.
    place: commands of a heading are listed by this number, then by name.
    """

    function: Callable[..., None]
    heading: str
    example: str
    place: int

    @property
    def summary(self) -> str:
        """The first paragraph of the function's docstring, in one line."""
        return " ".join((self.function.__doc__ or "").split("\n\n")[0].split())


_DESCRIBED: dict[str, Described] = {}


def command(heading: str, example: str, place: int = LAST) -> Callable[[F], F]:
    """Decorate the function NAME_command: `deepstack NAME` calls it."""
    assert heading in HEADINGS, heading

    def register(function: F) -> F:
        name = function.__name__.removesuffix("_command")
        _DESCRIBED[name] = Described(function, heading, example, place)
        return function

    return register


def find_commands() -> dict[str, Described]:
    """Return every command by its name, in the order of the help.

    A command is the file NAME_command.py of this package, an instrument or an integration.
    """
    import_files([*sorted((PACKAGE / "cli").glob("*_command.py")), *extension_files("*_command")])

    def order(item: tuple[str, Any]) -> tuple[int, int, str]:
        name, one = item
        return HEADINGS.index(one.heading), one.place, name

    return dict(sorted(_DESCRIBED.items(), key=order))
