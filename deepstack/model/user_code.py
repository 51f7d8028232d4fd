"""Runs a user's file, and code of it, so that it cannot end Python or change the modes of torch."""

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from deepstack.base.errors import ConfigError
from deepstack.base.plugins import unreadable

ENDS = ("_exit", "abort", "execv", "execve", "kill", "killpg")
"""Functions of os that end this process, or may."""


class EndOfPython(SystemExit):
    """Raised where a user's code would end the process without an exception."""


def run_file(path: Path, page: str) -> ModuleType:
    """Run a Python file and return its module; it may import files beside it.

    page: the one on such files, such as docs/conform.md.

    Raises ConfigError with the line if the file cannot be run, or ends Python.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(unreadable(path, error, page)) from error
    module = ModuleType(f"deepstack_file_{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    with guarded("", str(path)):
        sys.path.insert(0, str(path.resolve().parent))
        exec(compile(content, str(path), "exec"), module.__dict__)
    return module


@contextmanager
def guarded(where: str, file: str = "") -> Iterator[None]:
    """Raise an error of a user's code as ConfigError, `where: file:line: kind: message`.

    where: the call, or '' for the file itself.
    file: the line is the innermost one of this file, if it has one in the traceback.

    Code that ends Python is an error as well.  Afterwards torch's modes, sys.path and the working
    folder are as before.
    """
    where = where and f"{where}: "
    with restored_modes(), without_ends():
        try:
            yield
        except ConfigError:
            raise
        except SystemExit as error:
            how = str(error) if isinstance(error, EndOfPython) else f"sys.exit({error.code!r})"
            raise ConfigError(f"{where}{place_in(error, file)}{how} ends Python") from error
        except Exception as error:
            raise ConfigError(f"{where}{problem_in(error, file)}") from error


@contextmanager
def restored_modes() -> Iterator[None]:
    """Restore default type and device, determinism, gradients, threads, paths after the block."""
    path, folder = list(sys.path), os.getcwd()
    device = torch.get_default_device()
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        stack.callback(os.chdir, folder)
        stack.callback(sys.path.__setitem__, slice(None), path)
        stack.callback(restore_determinism, determinism())
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(restore_device, device)
        yield


def determinism() -> tuple[bool, bool]:
    """Return whether torch uses deterministic algorithms alone, and whether it only warns."""
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


def restore_determinism(before: tuple[bool, bool]) -> None:
    """Set torch's determinism, unless it is so already: setting it imports torch's compiler."""
    if determinism() != before:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def restore_device(device: torch.device) -> None:
    """Set the default device, unless it is this one already."""
    if torch.get_default_device() != device:
        torch.set_default_device(None if device.type == "cpu" else device)


@contextmanager
def without_ends() -> Iterator[None]:
    """Raise EndOfPython inside the block where this process would end without an exception."""
    process = os.getpid()
    before: list[tuple[Any, str, Any]] = [(os, name, getattr(os, name)) for name in ENDS]
    before.append((signal, "raise_signal", signal.raise_signal))

    def ending(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def end(*args: Any) -> Any:
            is_other = name in ("os.kill", "os.killpg") and args[0] not in (process, 0, -process)
            if is_other or os.getpid() != process:  # a child of the user's code may end itself
                return own(*args)
            raise EndOfPython(f"{name}({', '.join(map(repr, args))})")

        return end

    for module, name, own in before:
        setattr(module, name, ending(f"{module.__name__}.{name}", own))
    try:
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)


def place_in(error: BaseException, file: str = "") -> str:
    """Return `file:line: ` of the innermost line outside of this module, or ''.

    file: the innermost line of this file comes first.
    """
    every = traceback.extract_tb(error.__traceback__)
    frames = [f for f in every if f.filename != __file__ and not f.filename.startswith("<frozen")]
    frames = [f for f in frames if f.filename == file] or frames
    return f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""


def problem_in(error: BaseException, file: str = "") -> str:
    """Return `file:line: ValueError: …`: the line of `place_in`, and the message."""
    return f"{place_in(error, file)}{type(error).__name__}: {error}"
