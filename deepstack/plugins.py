"""A user's own schemes, tasks, diagnostics and charts, from files named on the command line.

A configuration cannot name a plugin: a YAML file must never run code.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from deepstack.errors import PluginError
from deepstack.registry import PREFIX, nearest

LOADED: dict[str, str] = {}
"""File name -> sha256 of every plugin loaded into this process, as stored in meta.json."""

PATHS: list[Path] = []
"""Paths of the loaded plugins, which a sweep passes to the processes of its runs."""

ROOMS = ("schemes", "tasks", "diagnostics", "plots", "theory")
"""The packages that plugins import from."""

LONGEST = 300  # characters of an error's message
_LOADING: list[Path] = []  # the file that is being loaded


def load_plugins(paths: Iterable[str | Path]) -> None:
    """Run each file once, so that its definitions register themselves.

    Raises PluginError when a file is missing, cannot be run, or has the name of another plugin.
    """
    if isinstance(paths, str | Path):
        raise PluginError(f"load_plugins: found one path; allowed a list, such as [{str(paths)!r}]")
    for path in map(Path, paths):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise PluginError(f"--plugin {path}: {error.strerror}") from error
        digest = hashlib.sha256(content).hexdigest()
        if LOADED.get(path.name) == digest:
            continue
        if path.name in LOADED:
            raise PluginError(f"--plugin {path}: another plugin is called {path.name} already")
        module = ModuleType(f"{PREFIX}{path.stem}")
        module.__file__, module.__package__ = str(path), ""
        sys.modules[module.__name__] = module
        with _loading(path):
            # Run the hashed bytes: the import system might run a stale .pyc instead.
            exec(compile(content, str(path), "exec"), module.__dict__)
        LOADED[path.name] = digest
        PATHS.append(path.resolve())


@contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Turn an error raised while the file runs into a PluginError with its line."""
    _LOADING.append(path)
    try:
        yield
    except (Exception, SystemExit) as error:
        where = getattr(error, "lineno", None) or _line_in(error, path)
        at = f"{path}:{where}" if where else str(path)
        known = isinstance(error, PluginError | SystemExit)
        kind = "" if known else f"{type(error).__name__}: "
        text = f"it ends Python, with {error.code!r}" if isinstance(error, SystemExit) else error
        raise PluginError(f"--plugin {at}: {kind}{text}{_way_on(error, path)}") from error
    finally:
        _LOADING.pop()


def refuse_while_loading(what: str) -> None:
    """Raise PluginError if a plugin trains while it is loaded, since every process of a sweep loads
    it again."""
    if _LOADING:
        raise PluginError(
            f"it calls {what} while it is loaded, as each process of a sweep does again; put that "
            "below `if __name__ == '__main__':`, or into a file of its own"
        )


def _way_on(error: BaseException, path: Path) -> str:
    """Return a hint for a failed import or a SystemExit, or ''."""
    if isinstance(error, SystemExit):
        return "; put what is to be run below `if __name__ == '__main__':`"
    if not isinstance(error, ImportError):
        return ""
    if wanted := re.search(r"cannot import name '(\w+)' from 'deepstack[.\w]*'", str(error)):
        word = wanted.group(1)
        for room in ROOMS:
            there = vars(importlib.import_module(f"deepstack.{room}")).get("__all__", ())
            if near := nearest(word, [name for name in there if name[0] == word[0]]):
                return f"; did you mean: from deepstack.{room} import {near}?"
    name = (error.name or "").partition(".")[0]
    if "relative import" in str(error) or (name and path.with_name(f"{name}.py").exists()):
        return (
            "; a plugin is one file, whose sha256 is recorded: put into it what it needs, or "
            "install that as a package"
        )
    return ""


def bug_in(error: BaseException) -> str | None:
    """Return 'my_file.py:12, in Mine.residual: NameError: …' for an error in a plugin's code.

    It has the innermost plugin line of the traceback, the message in one line, and the file of the
    traceback (a note of the error).  None if no plugin is in the traceback.
    """
    trace, at = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if str(trace.tb_frame.f_globals.get("__name__")).startswith(PREFIX):
            at = f"{code.co_filename}:{trace.tb_lineno}, in {code.co_qualname}"
        trace = trace.tb_next
    if not at:
        return None
    said = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    said = said if len(said) <= LONGEST else f"{said[:LONGEST]} …"
    log = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{at}: {type(error).__name__}{said and ': '}{said}{log}"


def known_elsewhere(registered: Any) -> bool:
    """Return whether another process with the same plugins has this class or function too.

    False for classes and functions of notebook cells and of other packages.
    """
    room, *_ = registered.__module__.split(".")
    return room == "deepstack" or room.startswith(PREFIX)


def require_plugins(recorded: Iterable[dict[str, str]], where: str) -> None:
    """Raise PluginError unless every plugin recorded by a run is loaded, unchanged."""
    for plugin in recorded:
        name, digest = plugin["file"], plugin["sha256"]
        if LOADED.get(name) != digest:
            found = f"found sha256 {LOADED[name]}" if name in LOADED else "it is not loaded"
            renamed = [other for other, known in LOADED.items() if known == digest]
            if renamed:
                found = f"{renamed[0]} is that very file, under another name than it had"
            raise PluginError(
                f"{where} was made with the plugin {name} (sha256 {digest}); {found}\n"
                f"give the same file: --plugin {name}"
            )


def _line_in(error: BaseException, path: Path) -> int | None:
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
