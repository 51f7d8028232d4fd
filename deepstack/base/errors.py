"""The errors that a user can meet, each with the exit code that the command line ends with.

The user sees the text of an error: one to three lines, or one line for each problem.  It names the
found value, the allowed values and the next step.
"""

from collections.abc import Sequence
from pathlib import Path


class DeepstackError(Exception):
    """The base of every error that deepstack raises on purpose."""

    exit_code: int = 1


class ConfigError(DeepstackError):
    """A wrong configuration, name or argument: nothing was run.

    key: the dotted key that is wrong ('model.scheme'), if a package that knows no file positions
        raises the error; `deepstack.config.locate` finds the place that belongs to it.
    """

    exit_code = 2

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class PluginError(ConfigError):
    """A plugin file is missing, has changed, or cannot be used."""


class PluginFailure(PluginError):
    """A plugin could not be used any more after steps were made: the run has failed."""

    exit_code = 1


class ResourceError(DeepstackError):
    """Memory, disk space or a device is missing."""

    exit_code = 5


class LockedError(ResourceError):
    """Another process holds the run folder."""


class DifferenceError(DeepstackError):
    """A recomputed value differs from the recorded one."""

    exit_code = 6


class ChangedLogError(DifferenceError):
    """A log no longer holds the rows that its run has written."""


class NothingMatchedError(DeepstackError):
    """No run, chart or name matched the request."""

    exit_code = 7


class BrokenChartError(DeepstackError):
    """A chart's own code has failed; the others were drawn.

    written: the files of those.
    """

    def __init__(self, message: str, written: Sequence[Path]) -> None:
        super().__init__(message)
        self.written = written


class OutOfMemoryError(ResourceError):
    """The run needs more memory than there is."""


class Interrupted(DeepstackError):
    """A signal ended the run after its state was saved; the same command goes on.

    exit_code is 128 + the signal's number, as shells have it.
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal


def needs_package(package: str | None, extra: str) -> str:
    """Return the words on a missing package, with the command that installs it."""
    install = f"pip install '.[{extra}]' in deepstack's folder"
    return f"needs the package {package}, of the extra [{extra}]: {install}"
