"""Reads the names that the files of a package register, without running them.

`deepstack list` and the completion of names use it, since importing torch takes a second.
"""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

PACKAGES = Path(__file__).parents[1]


class Declaration(NamedTuple):
    """A class or function that registers itself under a name.

    class_name: of a class, else the function's name.  document: the docstring.  arguments,
    keywords: of the decorator, or keywords of the class statement.  Values that are no constants
    are None.
    """

    class_name: str
    document: str
    arguments: list[Any]
    keywords: dict[str, Any]


@cache
def declarations(package: str, kind: str) -> dict[str, Declaration]:
    """Return the declarations of a package by name, in alphabetical order.

    kind: the decorator, as in @task("text"); "" for classes, as in `class Mine(Scheme, name="x")`.
    """
    entries = {}
    for file, module in modules(package).items():
        known = constants(package, file)
        for node in cast(list[Any], module.body):
            for call in registrations(node, kind):
                arguments = [value_of(one, known) for one in getattr(call, "args", ())]
                keywords = {str(k.arg): value_of(k.value, known) for k in call.keywords}
                name = str(arguments.pop(0) if kind else keywords.get("name") or "")
                text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
                entries[name] = Declaration(node.name, text, arguments, keywords)
    return {name: entries[name] for name in sorted(entries) if name}


def registrations(node: Any, kind: str) -> list[Any]:
    """Return a class statement, or the decorators of a function that are of this kind."""
    if isinstance(node, ast.ClassDef):
        return [] if kind else [node]
    decorators = node.decorator_list if kind and isinstance(node, ast.FunctionDef) else []
    return [one for one in decorators if getattr(getattr(one, "func", None), "id", "") == kind]


@cache
def modules(package: str) -> dict[str, ast.Module]:
    """Return the parsed files of a package by their names."""
    paths = sorted((PACKAGES / package).glob("*.py"))
    return {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@cache
def constants(package: str, file: str) -> dict[str, Any]:
    """Return the constants of a file, with those that it imports from its package and config."""
    values: dict[str, Any] = {}
    for node in modules(package)[file].body:
        if isinstance(node, ast.ImportFrom):
            home, _, source = str(node.module).rpartition(".")
            if home == f"deepstack.{package}":
                values |= constants(package, source)
            elif home == "deepstack.config":  # imports no torch
                values |= vars(import_module(str(node.module)))
    return values | dict(assignments(modules(package)[file].body, {}))


@cache
def attributes(package: str, class_name: str) -> dict[str, Any]:
    """Return the constant attributes of a class, with those of its bases in the package."""
    for file, module in modules(package).items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                bases = [one.id for one in reversed(node.bases) if isinstance(one, ast.Name)]
                inherited = {k: v for base in bases for k, v in attributes(package, base).items()}
                return inherited | dict(assignments(node.body, constants(package, file)))
    return {}


def assignments(nodes: Any, known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each assignment to one name."""
    for node in nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(targets[0], ast.Name) and getattr(node, "value", None) is not None:
            yield targets[0].id, value_of(node.value, known)


def value_of(node: ast.expr, known: dict[str, Any]) -> Any:
    """Return the value of a constant expression; of a call, the list of its arguments."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Call):
        return [value_of(one, known) for one in node.args]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
