"""The interface to the place of execution: this machine or a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from deepstack import plugins
from deepstack.sweeps.plan import Cell


class Process(Protocol):
    """A run that was started."""

    def poll(self) -> int | None:
        """Return the exit code, negative for the signal that ended it; None while it runs.

        143 if its node or fork server was lost: the run is interrupted, not failed.
        """
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        ...

    def stderr_text(self) -> str:
        """Return its stderr."""
        ...


class Launcher(Protocol):
    """Starts each run in a separate process while there are resources for it."""

    def start(self, cell: Cell) -> Process | None:
        """Start the cell's run; return None if it has to wait for one that runs."""
        ...

    def close(self) -> None:
        """End the remaining processes."""
        ...


def train_arguments(study: str, out: str | Path) -> list[str]:
    """Return the arguments after the configuration of `deepstack train` for a run of a study."""
    arguments = ["--quiet", "--out", str(out), "--study", study]
    for plugin in plugins.LOADED.values():
        arguments += ["--plugin", str(plugin.path)]
    return arguments
