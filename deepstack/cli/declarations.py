"""Reads the names that the files of a package register, without running them.

`deepstack list` and the completion of names use it, since importing torch takes a second.
"""

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, cast

from deepstack.base.extensions import HOMES, PACKAGE, ROOT, extension_files, module_name

EXTENDED = {"plots": "chart", "diagnostics": "measure"}
"""Packages whose definitions also stand in files of that name of additions."""

DEFINITIONS = {
    "model.attention": ("model", "AttentionSublayer"),
    "model.feed_forward": ("model", "FeedForwardSublayer"),
    "model.activation": ("model", "Activation"),
    "train.optimizer": ("training", "Optimizer"),
    "train.schedule": ("training", "Schedule"),
}
"""Settings that name a definition: the package of its kind, and the base class."""


class Declaration(NamedTuple):
    """A class or function that registers itself under a name.

    class_name: of a class, else the function's name.
    document: the docstring.  arguments,
    keywords: of the decorator, or keywords of the class statement.  Values that are not constants
        are None.
    """

    class_name: str
    document: str
    arguments: list[Any]
    keywords: dict[str, Any]


@cache
def declarations(package: str, kind: str) -> dict[str, Declaration]:
    """Return the declarations of a package by name, in alphabetical order.

    kind: the decorator, as in @task("text"); the base class, as in `class Mine(Schedule,
        name="x")`; "" for the classes of all bases.
    """
    entries = {}
    bases = {kind}
    for file, module in modules(package).items():
        known = constants(file)
        for node in cast(list[Any], module.body):
            for call in registrations(node, kind, bases):
                arguments = [value_of(one, known) for one in getattr(call, "args", ())]
                keywords = {str(k.arg): value_of(k.value, known) for k in call.keywords}
                is_class = isinstance(call, ast.ClassDef)
                name = str(keywords.get("name") or "" if is_class else arguments.pop(0))
                text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
                entries[name] = Declaration(node.name, text, arguments, keywords)
    return {name: entries[name] for name in sorted(entries) if name}


def declared_names(key: str) -> list[str]:
    """Return the names that deepstack defines for a setting that names a definition."""
    return list(declarations(*DEFINITIONS[key]))


def registrations(node: Any, kind: str, bases: set[str] | None = None) -> list[Any]:
    """Return a class statement, or the decorators of a function that are of this kind.

    bases: the classes of this kind, to which a class of this kind is added.
    """
    if isinstance(node, ast.ClassDef):
        if not kind:
            return [node]
        if bases is None or not {getattr(base, "id", "") for base in node.bases} & bases:
            return []
        bases.add(node.name)
        return [node]
    decorators = node.decorator_list if kind and isinstance(node, ast.FunctionDef) else []
    return [one for one in decorators if getattr(getattr(one, "func", None), "id", "") == kind]


def home_of(module: str) -> list[str]:
    """Return the package of the core, or the addition, of a module, as words."""
    words = module.split(".")
    return words[: 3 if "/".join(words[:2]) in HOMES else 2]


@cache
def parsed(module: str) -> ast.Module | None:
    """Return the syntax tree of a module of deepstack; None for a package."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")) if path.exists() else None


def modules(package: str) -> dict[str, ast.Module]:
    """Return the syntax trees of a package and of its extensions by their full names.

    package: a folder below deepstack/, or beside it.
    """
    folder = next(home / package for home in (PACKAGE, ROOT) if (home / package).is_dir())
    paths = sorted(folder.glob("*.py"))
    if package in EXTENDED:
        paths += extension_files(EXTENDED[package])
    trees = {name: parsed(name) for name in map(module_name, paths)}
    return {name: tree for name, tree in trees.items() if tree is not None}


@cache
def constants(file: str) -> dict[str, Any]:
    """Return the constants of a module, with those that it imports from its folder and config."""
    values: dict[str, Any] = {}
    tree = parsed(file)
    body = tree.body if tree else []
    for node in body:
        source = str(node.module) if isinstance(node, ast.ImportFrom) else ""
        if source.startswith("deepstack.config"):  # imports no torch
            values |= vars(import_module(source))
        elif home_of(source) == home_of(file) and parsed(source):
            values |= constants(source)
    return values | dict(assignments(body, {}))


@cache
def attributes(package: str, class_name: str) -> dict[str, Any]:
    """Return the constant attributes of a class and of its bases in the package."""
    for file, module in modules(package).items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                bases = [one.id for one in reversed(node.bases) if isinstance(one, ast.Name)]
                inherited = {k: v for base in bases for k, v in attributes(package, base).items()}
                return inherited | dict(assignments(node.body, constants(file)))
    return {}


def declared_options(package: str, class_name: str) -> dict[str, Any]:
    """Return name and default of the annotated attributes of a class, but for ClassVars."""
    return {
        node.target.id: value_of(node.value, constants(file))
        for file, module in modules(package).items()
        for one in module.body
        if isinstance(one, ast.ClassDef) and one.name == class_name
        for node in one.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
        if "ClassVar" not in ast.unparse(node.annotation)
    }


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
