"""The logs of instruments in a run folder."""

import contextlib
from pathlib import Path

from deepstack.base.errors import ResourceError
from deepstack.config.instruments import specs
from deepstack.records.files import open_file

OF_EVERY_RUN = ("steps", "evals", "timing")


def instrument_logs(folder: Path) -> list[str]:
    """Return the names of the logs of instruments in a run folder, in alphabetical order.

    They are, besides steps, evals and timing, the CSV files of known instruments, and others whose
    first column is the step.
    """
    names = {path.stem for path in folder.glob("[!.]*.csv")} - {*OF_EVERY_RUN}
    return sorted(name for name in names if name in specs() or has_steps(folder / f"{name}.csv"))


def has_steps(path: Path) -> bool:
    """Return whether the first column of a CSV file is the step."""
    with contextlib.suppress(OSError, ResourceError), open_file(path) as file:
        return file.read(5) in (b"step,", b"step\n")
    return False
