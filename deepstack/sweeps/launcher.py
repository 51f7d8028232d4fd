"""Where the runs of a plan take place: one interface for this machine and for a cluster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

from deepstack import plugins
from deepstack.sweeps.plan import Cell


class Process(Protocol):
    """A run that was started."""

    def poll(self) -> int | None:
        """Exit code, negative for the signal that ended it; None while it runs.

        143 where only its place was lost (a node, a starter): the run is interrupted, not failed.
        """
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        ...

    def said(self) -> str:
        """What it wrote to stderr."""
        ...


class Launcher(ABC):
    """Starts runs, each in a process of its own, while there is room for them.

    Used in a `with` block: nothing is started before it, nothing is left behind after it.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @abstractmethod
    def has_room(self, cell: Cell, running: Sequence[Cell]) -> bool:
        """Whether the cell may start beside those that run now."""

    @abstractmethod
    def start(self, cell: Cell) -> Process:
        """Start the cell's run."""

    @abstractmethod
    def close(self) -> None:
        """End what is left."""


def train_words(config: str | Path, *, out: str | Path, study: str) -> list[str]:
    """The arguments with which `deepstack` trains one run of a study, wherever that is."""
    words = ["train", str(config), "--quiet", "--out", str(out), "--study", study]
    for path in plugins.PATHS:
        words += ["--plugin", str(path)]
    return words
