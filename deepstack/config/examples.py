"""The example configurations that come with deepstack."""

from __future__ import annotations

from pathlib import Path

from deepstack.errors import ConfigError
from deepstack.registry import unknown

# An installed package carries them inside, a checkout beside.
_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parent / "configs")


def example(name: str) -> Path:
    """Return the path of an example configuration by name, as in example('quick').

    Raises ConfigError with the nearest name when there is none of that name.
    """
    paths = {path.stem: path for folder in _FOLDERS for path in folder.glob("*.yaml")}
    if name not in paths:
        raise ConfigError(unknown("example", name, sorted(paths)))
    return paths[name]
