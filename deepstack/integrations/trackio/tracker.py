"""Registers trackio: `deepstack export --logs trackio`."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from deepstack.base import ConfigError
from deepstack.records import Run
from deepstack.runs import Tracker, register_tracker


def export(runs: Sequence[Run], to: Path) -> None:
    """Write a database of trackio for each study, with the pictures beside it."""
    os.environ["TRACKIO_DIR"] = str(to.resolve())  # read once, by the import
    import trackio

    from deepstack.plots import log_values, logged_settings

    if Path(trackio.TRACKIO_DIR) != to.resolve():
        raise ConfigError(f"trackio writes to {trackio.TRACKIO_DIR} until this process ends")
    for run in runs:
        trackio.init(
            project=run.study, name=run.name, config=logged_settings(run),
            embed=False, resume="never", auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
        log_values(run, trackio.log, trackio.Image)
        trackio.finish()


def show(folder: Path) -> str:
    """Return the command that shows exported runs."""
    return f"TRACKIO_DIR={shlex.quote(str(folder))} trackio show"


register_tracker("trackio", Tracker(export, show))
