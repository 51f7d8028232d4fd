"""Exports the logs of finished or running runs to a tracker's own files, without a network."""

import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from deepstack.base import ConfigError, DeepstackError, ResourceError, needs_package, unknown
from deepstack.records import Run
from deepstack.runs import known_trackers


def export_logs(runs: Sequence[Run], tracker: str, to: Path) -> str:
    """Write the logs of runs into the new folder `to`; return the command that shows them.

    Raises ConfigError for an unknown tracker, one whose package is missing, or an existing folder,
    ResourceError if the disk refuses, and DeepstackError with the reason if the tracker fails.  A
    failed export leaves no folder.
    """
    if tracker not in known_trackers():
        raise ConfigError(f"--logs: {unknown('tracker', tracker, known_trackers())}")
    if to.exists():
        raise ConfigError(f"{to} exists already; give another folder with --to")
    chosen = known_trackers()[tracker]
    try:
        with redirect_stdout(sys.stderr), errors_of_threads():  # libraries greet on stdout
            chosen.export(runs, to)
    except ImportError as error:
        discard(to)
        raise ConfigError(f"--logs: {tracker} {needs_package(error.name, tracker)}") from error
    except DeepstackError:
        discard(to)
        raise
    except Exception as error:
        discard(to)
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        kind = ResourceError if isinstance(error, OSError) else DeepstackError
        raise kind(f"--logs: {tracker} could not write the runs: {reason}") from error
    return chosen.show(to)


@contextmanager
def errors_of_threads() -> Iterator[None]:
    """Raise the first error of a thread at the end of the block, which prints none of them."""
    errors: list[BaseException | None] = []
    before = threading.excepthook
    threading.excepthook = lambda failure: errors.append(failure.exc_value)
    try:
        yield
    finally:
        threading.excepthook = before
    for error in filter(None, errors):
        raise error


def discard(folder: Path) -> None:
    """Remove a folder that an export began."""
    shutil.rmtree(folder, ignore_errors=True)
