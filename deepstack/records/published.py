"""The folder results/published: commands read its runs, and none writes there."""

import os
from itertools import pairwise
from pathlib import Path

from deepstack.base.errors import ConfigError

PUBLISHED = "published"
_PARTS = ("results", PUBLISHED)


def is_published(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is results/published or lies below it."""
    return _place(path) is not None


def writable(path: Path) -> Path:
    """Return the path for output on published runs: results/figures/… for results/published/…"""
    published = _place(path)
    if published is None:
        return path
    parts, position = published
    below = [part for part in parts[position + 1 :] if part != "figures"]
    moved = Path(*parts[:position], "figures", *below)
    return moved if path.is_absolute() else Path(os.path.relpath(moved))


def refuse_published(path: Path) -> None:
    """Raise ConfigError for a path in results/published."""
    if is_published(path):
        raise ConfigError(
            f"{path}: no command writes to results/published; give another folder with --out or "
            "--to, or copy the runs"
        )


def _place(path: str | os.PathLike[str]) -> tuple[tuple[str, ...], int] | None:
    """Return the parts of the absolute path and the index of `published` among them, or None.

    The path counts as it is written, and with its links resolved.
    """
    for absolute in (os.path.abspath(path), os.path.realpath(path)):
        parts = Path(absolute).parts
        for index, two in enumerate(pairwise(parts), 1):
            if two == _PARTS:
                return parts, index
    return None
