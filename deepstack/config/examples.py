"""The example configurations that come with deepstack."""

from __future__ import annotations

from pathlib import Path

from deepstack.errors import ConfigError
from deepstack.registry import unknown

# An installed package carries them inside, a checkout beside.
_PACKAGE = Path(__file__).resolve().parents[1]
_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parent / "configs")


def example_paths() -> dict[str, Path]:
    """Return the path of every example configuration by name."""
    paths = [path for folder in _FOLDERS for path in folder.glob("*.yaml")]
    return {path.stem: path for path in sorted(paths)}


def example(name: str) -> Path:
    """Return the path of an example configuration by name, as in example('quick').

    Raises ConfigError with the nearest name when there is none of that name.
    """
    paths = example_paths()
    if name not in paths:
        raise ConfigError(unknown("example", name, sorted(paths)))
    return paths[name]


def example_or_file(path: Path) -> Path:
    """Return the example that a bare name means if there is no such file, else the path."""
    return path if path.exists() else example_paths().get(str(path), path)


def description(path: Path) -> str:
    """Return the first sentence of the comment that opens a configuration."""
    lines = path.read_text(encoding="utf-8").splitlines()
    count = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    text = " ".join(line.lstrip("# ") for line in lines[:count])
    return text.replace("  ", " ").partition(". ")[0].rstrip(".") + "."
