"""A user's own schemes, tasks, diagnostics and charts, from files named on the command line.

A configuration cannot name a plugin: a YAML file must never run code.
"""

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, NamedTuple

from deepstack.base.errors import PluginError
from deepstack.base.registry import PREFIX, nearest


class Plugin(NamedTuple):
    """A loaded file: its absolute path, its sha256 as stored in meta.json, and its bytes."""

    path: Path
    sha256: str
    content: bytes


LOADED: dict[str, Plugin] = {}
"""The plugins of this process by file name; a sweep loads them in the processes of its runs too."""

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
            raise PluginError(f"--plugin {unreadable(path, error, 'docs/plugins.md')}") from error
        run_plugin(path, content)


def run_plugin(path: Path, content: bytes, *, is_copy: bool = False) -> None:
    """Run a plugin's bytes once.

    is_copy: whether it is a run's copy, which has no `__file__`: other files may lie beside it.

    Raises PluginError as `load_plugins`.
    """
    digest = hashlib.sha256(content).hexdigest()
    if path.name in LOADED:
        if LOADED[path.name].sha256 == digest:
            return
        raise PluginError(f"--plugin {path}: another plugin is called {path.name} already")
    module = ModuleType(f"{PREFIX}{path.stem}")
    module.__package__ = ""
    if not is_copy:
        module.__file__ = str(path)
    sys.modules[module.__name__] = module
    with _loading(path):
        # Run the hashed bytes: the import system might run a stale .pyc instead.
        exec(compile(content, str(path), "exec"), module.__dict__)
    LOADED[path.name] = Plugin(path.absolute(), digest, content)


def unreadable(path: Path, error: OSError, page: str) -> str:
    """Return the message on a Python file that cannot be read, with the file that was meant.

    page: the one on such files, such as docs/plugins.md.
    """
    found = "found a folder" if path.is_dir() else error.strerror
    near = nearest(path.name, [one.name for one in path.parent.glob("*.py")])
    hint = f"; did you mean {str(path.with_name(near))!r}?" if near else ""
    return f"{path}: {found}; allowed a Python file{hint} ({page})"


@contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Turn an error raised while the file runs into a PluginError with its line."""
    _LOADING.append(path)
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename == str(path)]
        line = getattr(error, "lineno", None) or next(reversed(lines), None)
        at = f"{path}:{line}" if line else str(path)
        text = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        if isinstance(error, SystemExit):
            below = "put what is to be run below `if __name__ == '__main__':`"
            text = f"it ends Python, with {error.code!r}; {below}"
        elif isinstance(error, ImportError):
            text += (
                "; a plugin is one file; it may import installed packages, and names of "
                "deepstack.schemes, .tasks, .diagnostics, .plots and .training "
                "(docs/plugins.md)"
            )
        raise PluginError(f"--plugin {at}: {text}") from error
    finally:
        _LOADING.pop()


def refuse_while_loading(function: str) -> None:
    """Raise PluginError if a plugin trains while it is loaded, since every process of a sweep loads
    it again."""
    if _LOADING:
        raise PluginError(
            f"it calls {function} while it is loaded, as each process of a sweep does again; put "
            "that below `if __name__ == '__main__':`, or into a file of its own"
        )


def bug_in(error: BaseException) -> str | None:
    """Return 'my_file.py:12, in Mine.residual: NameError: …' for an error in a plugin's code.

    It has the innermost plugin line of the traceback, the message in one line, and the file of the
    traceback (a note of the error).  None if no plugin is in the traceback.
    """
    at = ""
    for frame, line in walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).startswith(PREFIX):
            at = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_qualname}"
    if not at:
        return None
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
    log = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return f"{at}: {type(error).__name__}{text and ': '}{text}{log}"


def known_elsewhere(registered: Any) -> bool:
    """Return whether another process with the same plugins has this class or function too.

    False for classes and functions of notebook cells and of other packages.
    """
    package, *_ = registered.__module__.split(".")
    return package == "deepstack" or package.startswith(PREFIX)


def require_plugins(recorded: Iterable[Mapping[str, str]], where: str, advice: str = "") -> None:
    """Raise PluginError unless every plugin recorded by a run is loaded, unchanged.

    advice: the end of the error.
    """
    loaded = {name: plugin.sha256 for name, plugin in LOADED.items()}
    for plugin in recorded:
        name, digest = plugin["file"], plugin["sha256"]
        if loaded.get(name) != digest:
            state = f"found sha256 {loaded[name]}" if name in loaded else "it is not loaded"
            raise PluginError(
                f"{where} was made with the plugin {name} (sha256 {digest}); {state}\n"
                f"give the same file: --plugin {name}{advice}"
            )
