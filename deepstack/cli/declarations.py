"""Reads what the files of a package register, without running them.

`deepstack list` and the completion of names use it, since importing torch takes a second.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import deepstack

PACKAGES = Path(deepstack.__file__).parent


class Declaration(NamedTuple):
    """A class or function that registers itself under a name.

    document: its docstring.  arguments, keywords: of the decorator, or keywords of the class
    statement.  attributes: of the class.  bases: names of its base classes.  Values that are no
    constants are None.
    """

    name: str
    document: str
    arguments: list[Any]
    keywords: dict[str, Any]
    attributes: dict[str, Any]
    bases: list[str]


@cache
def declarations(package: str, kind: str) -> dict[str, Declaration]:
    """Return what a package registers, by name in alphabetical order.

    kind: the decorator, as in @task("text"); "" for classes, as in `class Mine(Scheme, name="x")`.
    """
    entries = functions(package, kind) if kind else list(classes(package).values())
    return {one.name: one for one in sorted(entries, key=lambda one: one.name) if one.name}


def functions(package: str, kind: str) -> list[Declaration]:
    """Return the functions of a package with this decorator."""
    entries = []
    for file, module in modules(package).items():
        known = constants(package, file)
        for node in module.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == kind:
                    name, *arguments = (value_of(one, known) for one in call.args)
                    keywords = {str(k.arg): value_of(k.value, known) for k in call.keywords}
                    text = document_of(node)
                    entries.append(Declaration(name, text, arguments, keywords, {}, []))
    return entries


@cache
def classes(package: str) -> dict[str, Declaration]:
    """Return the classes of a package by the name of the class; most do not register themselves."""
    entries = {}
    for file, module in modules(package).items():
        known = constants(package, file)
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                keywords = {str(k.arg): value_of(k.value, known) for k in node.keywords}
                attributes = dict(assignments(node.body, known))
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                name, text = str(keywords.get("name") or ""), document_of(node)
                entries[node.name] = Declaration(name, text, [], keywords, attributes, bases)
    return entries


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


def attribute(package: str, declaration: Declaration, name: str) -> Any:
    """Return a constant attribute of a class, or that of its first base that has it."""
    if name in declaration.attributes:
        return declaration.attributes[name]
    for base in declaration.bases:
        if base in classes(package):
            return attribute(package, classes(package)[base], name)
    return None


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


def document_of(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return the docstring of a class or function, as `inspect.getdoc` does."""
    return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
