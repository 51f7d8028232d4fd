"""Registers trackio: `log.to: [trackio]` and `deepstack export --logs trackio`."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepstack.integrations.trackio.client import trackio_in
from deepstack.records import Run
from deepstack.runs import Tracker, register_tracker


def export(runs: Sequence[Run], to: Path) -> None:
    """Write a database of trackio for each study, with the pictures beside it."""
    from deepstack.plots import log_values
    from deepstack.runs import logged_settings

    trackio = trackio_in(to)
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


def live() -> Any:
    """Return the observer that logs a run while it trains."""
    from deepstack.integrations.trackio.live_log import TrackioLog

    return TrackioLog()


register_tracker("trackio", Tracker(export, show, live))
