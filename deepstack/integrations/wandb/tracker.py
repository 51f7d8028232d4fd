"""Registers W&B: `log.to: [wandb]` and `deepstack export --logs wandb`."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepstack.integrations.wandb.client import FORBIDDEN, quiet_wandb
from deepstack.records import Run
from deepstack.runs import Tracker, register_tracker


def export(runs: Sequence[Run], to: Path) -> None:
    """Write one offline run of W&B for each run, in <to>/wandb; `wandb sync` sends them."""
    from deepstack.plots import log_values
    from deepstack.runs import logged_settings

    wandb, quiet = quiet_wandb()
    to.mkdir(parents=True)
    for run in runs:
        log = wandb.init(
            mode="offline", dir=str(to), project=re.sub(FORBIDDEN, "_", run.study),
            name=run.name, settings=quiet, config=logged_settings(run), reinit="create_new",
        )  # fmt: skip
        log_values(run, log.log, wandb.Image)
        log.finish()
    wandb.teardown()  # waits until the process that writes the files has written all


def show(folder: Path) -> str:
    """Return the command that sends exported runs to W&B."""
    return f"wandb sync {shlex.quote(str(folder))}/wandb/offline-run-*"


def live() -> Any:
    """Return the observer that logs a run while it trains."""
    from deepstack.integrations.wandb.live_log import WandbLog

    return WandbLog()


register_tracker("wandb", Tracker(export, show, live))
