"""The registry of trackers: programs that show logs, such as TensorBoard.

Each registers itself in the file tracker.py of a folder of integrations/.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepstack.base.errors import ConfigError, needs_package
from deepstack.base.extensions import import_extensions
from deepstack.base.registry import Registry
from deepstack.records import Run


@dataclass(frozen=True)
class Tracker:
    """A tracker; its package and the extra of deepstack that installs it have its name.

    export: a function that writes the logs of runs into a new folder.
    show: a function that returns the command that shows such a folder.
    live: a function that returns an Observer with `close`, which logs a run while it trains
        (`log.to`); None if the tracker has none.
    """

    export: Callable[[Sequence[Run], Path], None]
    show: Callable[[Path], str]
    live: Callable[[], Any] | None = None


_TRACKERS: Registry[Tracker] = Registry("tracker")


def register_tracker(name: str, tracker: Tracker) -> None:
    """Add a tracker under the name of its package."""
    _TRACKERS.register(name, tracker)


def known_trackers() -> Registry[Tracker]:
    """Return every tracker by name."""
    import_extensions("tracker")
    return _TRACKERS


def live_logs(names: Iterable[str]) -> list[Callable[[], Any]]:
    """Return the function of each tracker that makes its live log.

    Raises ConfigError for a tracker whose integration or package is missing.
    """
    logs = []
    for name in names:
        tracker = known_trackers().get(name) if name in known_trackers() else None
        if tracker is None or tracker.live is None:
            raise ConfigError(f"log.to: deepstack/integrations/{name} is missing", key="log.to")
        if find_spec(name) is None:
            raise ConfigError(f"log.to: {name} {needs_package(name, name)}", key="log.to")
        logs.append(tracker.live)
    return logs
