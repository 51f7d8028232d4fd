"""Registers TensorBoard: `log.to: [tensorboard]` and `deepstack export --logs tensorboard`."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepstack.records import Run
from deepstack.runs import Tracker, register_tracker


def export(runs: Sequence[Run], to: Path) -> None:
    """Write one event file for each run, in <to>/<study>/<run>."""
    from deepstack.integrations.tensorboard.events import EventLog
    from deepstack.plots import heat_map_images
    from deepstack.runs import logged_settings, scalars

    for run in runs:
        log = EventLog(to / run.study / run.name)
        log.text(0, "settings", logged_settings(run))
        for step, values in scalars(run):
            log.scalars(step, values)
        for key, step, png in heat_map_images(run):
            log.picture(step, key, png)
        log.close()


def show(folder: Path) -> str:
    """Return the command that shows exported runs."""
    return shlex.join(["tensorboard", "--logdir", str(folder)])


def live() -> Any:
    """Return the observer that logs a run while it trains."""
    from deepstack.integrations.tensorboard.live_log import TensorBoardLog

    return TensorBoardLog()


register_tracker("tensorboard", Tracker(export, show, live))
