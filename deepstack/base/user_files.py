"""Runs a Python file of the user, and names the line of an error in it."""

import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from deepstack.base.errors import ConfigError


def run_file(path: Path) -> ModuleType:
    """Run a Python file and return its module; it may import files beside it.

    Raises ConfigError with the line if the file cannot be run.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    module = ModuleType(f"deepstack_file_{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)
    except SystemExit as error:
        raise ConfigError(
            f"{path}: it ends Python, with {error.code!r}; put what is to be run below "
            "`if __name__ == '__main__':`"
        ) from error
    except Exception as error:
        raise ConfigError(f"{path}: {problem_in(error, str(path))}") from error
    finally:
        sys.path.pop(0)
    return module


def problem_in(error: BaseException, file: str = "") -> str:
    """Return `file:line: ValueError: …`: a line of the traceback, and the message.

    file: the line is the innermost one of this file, and left out if there is none; without a
        file it is the innermost line of all.
    """
    every = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in every if frame.filename == file or not file]
    at = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{at}{type(error).__name__}: {error}"
