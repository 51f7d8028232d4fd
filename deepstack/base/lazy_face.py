"""The face of a package whose names are imported when they are first used."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_face(package: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that shows names of its modules.

    Importing the package imports none of these modules.

    names: module -> its names.  None may be the name of a module of the package: once imported, a
        module is an attribute, and hides the name.
    """

    def get(name: str) -> Any:
        for module, shown in names.items():
            if name in shown:
                return getattr(import_module(f"{package}.{module}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
