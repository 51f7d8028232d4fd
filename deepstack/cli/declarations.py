"""Reads the names that the files of a package register, without torch and matplotlib.

`deepstack list` and the completion of names use it, since importing torch takes a second.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import deepstack

PACKAGES = Path(deepstack.__file__).parent


class LazyModule(dict[str, Any]):
    """The names of one file; the statement that defines a name runs when the name is first read.

    A name from another file of the same package is read there in the same way; other imports are
    real.  A class with keywords (a scheme) has only its attributes and class methods.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(__name__=__name__)
        self.path = path
        self.body = ast.parse(path.read_text(encoding="utf-8")).body

    def __missing__(self, name: str) -> Any:
        for node in self.body:
            if name in names_defined(node):
                self.run(node, name)
                return self[name]
        raise KeyError(name)

    def run(self, node: ast.stmt, name: str = "") -> None:
        """Run one statement of the file, or get `name` from the file that it imports it from."""
        home = f"deepstack.{self.path.parent.name}."
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(home):
            (source,) = (one.name for one in node.names if name in (one.asname, one.name))
            file = f"{str(node.module).removeprefix(home)}.py"
            self[name] = lazy_module(self.path.with_name(file))[source]
            return
        if isinstance(node, ast.ClassDef) and has_more_than_declarations(node):
            node = declarations_of(node)
        if isinstance(node, ast.ClassDef):  # its body looks names up without __missing__
            values = [
                line.value for line in node.body if isinstance(line, ast.Assign | ast.AnnAssign)
            ]
            for word in (one for value in values if value for one in ast.walk(value)):
                if isinstance(word, ast.Name) and word.id not in vars(builtins):
                    with suppress(KeyError):  # a name of the class itself
                        self[word.id]
        code = ast.Module([node], type_ignores=[])
        exec(compile(ast.fix_missing_locations(code), str(self.path), "exec"), self)


@cache
def lazy_module(path: Path) -> LazyModule:
    """Return the names of a file; each file is read once."""
    return LazyModule(path)


def names_defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [one.asname or one.name.partition(".")[0] for one in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [
        name.id for one in targets if one for name in ast.walk(one) if isinstance(name, ast.Name)
    ]


def has_more_than_declarations(node: ast.ClassDef) -> bool:
    """Return whether a class is a scheme or a module of torch."""
    return bool(node.keywords) or any(isinstance(base, ast.Attribute) for base in node.bases)


def declarations_of(node: ast.ClassDef) -> ast.ClassDef:
    """Return a class with the docstring, attributes and class methods of another.

    Its keywords, such as `name`, become attributes.
    """
    body: list[ast.stmt] = []
    for line in node.body:
        decorators = [getattr(one, "id", "") for one in getattr(line, "decorator_list", ())]
        one_name = isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
        if one_name or isinstance(line, ast.Expr | ast.AnnAssign) or "classmethod" in decorators:
            body.append(line)
    bases: list[ast.expr] = [base for base in node.bases if isinstance(base, ast.Name)]
    body += [ast.Assign([ast.Name(str(one.arg), ast.Store())], one.value) for one in node.keywords]
    return ast.ClassDef(node.name, bases, [], body, [])


def declared(package: str, module: str) -> LazyModule:
    """Return the names of a module of a package of deepstack."""
    return lazy_module(PACKAGES / package / f"{module}.py")


def modules_of(package: str) -> list[LazyModule]:
    """Return the files of a package of deepstack."""
    return [lazy_module(path) for path in sorted((PACKAGES / package).glob("*.py"))]


@cache
def registered(package: str, kind: str) -> list[str]:
    """Return the names that the files of a package register, read without running them.

    kind: the decorator, as in @task("text"); "" for classes, as in `class Mine(Scheme, name="x")`.
    """
    return sorted(name for module in modules_of(package) for name, _ in entries(module, kind))


def entries(module: LazyModule, kind: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield name and statement of each class (kind "") or decorated function of a file."""
    for node in module.body:
        if isinstance(node, ast.ClassDef) and not kind:
            words = [one.value for one in node.keywords if one.arg == "name"]
        elif isinstance(node, ast.FunctionDef) and kind:
            calls = [one for one in node.decorator_list if isinstance(one, ast.Call)]
            words = [one.args[0] for one in calls if getattr(one.func, "id", "") == kind]
        else:
            continue
        for word in words:
            if isinstance(word, ast.Constant):
                yield str(word.value), node


@cache
def declare(package: str, kind: str) -> dict[str, Any]:
    """Run the decorated functions of a package, which register themselves; for "", its classes.

    Returns the classes or functions by name, sorted.
    """
    objects = {}
    for module in modules_of(package):
        for name, node in entries(module, kind):
            module.run(node)
            objects[name] = module[node.name]  # type: ignore[attr-defined]
    return dict(sorted(objects.items()))
