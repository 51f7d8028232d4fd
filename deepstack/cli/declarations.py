"""Reads the names that the files of a package register, without running them.

The completion of names uses it, since importing torch takes a second.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepstack

PACKAGES = Path(deepstack.__file__).parent


def declared_names(package: str, kind: str) -> list[str]:
    """Return the names that a package registers, in alphabetical order.

    kind: the decorator, as in @task("text"); "" for classes, as in `class Mine(Scheme, name="x")`.
    """
    names = []
    for path in (PACKAGES / package).glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names += [ast.literal_eval(name) for name in registrations(node, kind)]
    return sorted(names)


def registrations(node: Any, kind: str) -> Iterator[ast.expr]:
    """Yield the name of a class statement, or of the decorators of a function of this kind."""
    if isinstance(node, ast.ClassDef) and not kind:
        yield from (keyword.value for keyword in node.keywords if keyword.arg == "name")
    elif isinstance(node, ast.FunctionDef):
        for one in node.decorator_list:
            if isinstance(one, ast.Call) and getattr(one.func, "id", "") == kind:
                yield one.args[0]
