"""A user's own schemes, tasks, diagnostics and charts, from files named on the command line.

A configuration cannot name one: what a YAML says must never run code.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from deepstack.errors import PluginError

PREFIX = "deepstack_plugin_"
"""What the names of plugins' modules begin with."""

LOADED: dict[str, str] = {}
"""File name -> sha256 of every plugin loaded into this process: a run's meta.json keeps it."""

PATHS: list[Path] = []
"""Where they lie: what a sweep hands on to the processes of its runs."""


def load_plugins(paths: Iterable[str | Path]) -> None:
    """Run each file once; what it defines registers itself.

    Raises PluginError when a file is missing, cannot be run, or has the name of another one.
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
        module.__file__ = str(path)
        sys.modules[module.__name__] = module
        try:
            # The very bytes that were hashed: the import system might run a stale .pyc instead.
            exec(compile(content, str(path), "exec"), module.__dict__)
        except Exception as error:
            where = getattr(error, "lineno", None) or _line_in(error, path)
            at = f"{path}:{where}" if where else str(path)
            raise PluginError(f"--plugin {at}: {type(error).__name__}: {error}") from error
        LOADED[path.name] = digest
        PATHS.append(path.resolve())


def known_elsewhere(registered: Any) -> bool:
    """Whether another process with the same plugins has a registered class or function too.

    Not what a notebook's cell, or a package of somebody's own, has registered here.
    """
    room, *_ = registered.__module__.split(".")
    return room == "deepstack" or room.startswith(PREFIX)


def require_plugins(recorded: Iterable[dict[str, str]], where: str) -> None:
    """Raise PluginError unless every plugin that a run was made with is loaded, unchanged."""
    for plugin in recorded:
        name, digest = plugin["file"], plugin["sha256"]
        if LOADED.get(name) != digest:
            found = f"found sha256 {LOADED[name]}" if name in LOADED else "it is not loaded"
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
