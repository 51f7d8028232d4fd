"""Runs of W&B while a run trains."""

import io
import os
import re
import secrets
from typing import Any

from deepstack.integrations.wandb.client import FORBIDDEN, quiet_wandb
from deepstack.plots import heat_map_images
from deepstack.records import Run
from deepstack.runs import logged_settings
from deepstack.training import LiveLog, Rows

STEP = "step"  # the key of the horizontal axis: a summary of layers comes after later steps


class WandbLog(LiveLog):
    """Writes an offline run of W&B into wandb/ of the run folder; $WANDB_MODE=online sends it."""

    name = "wandb"

    def open(self, run: Run, known: str | None) -> str:
        wandb, quiet = quiet_wandb()
        self._image = wandb.Image
        settings = {key: value for key, value in logged_settings(run).items() if key != "state"}
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._log = wandb.init(
            mode=mode, dir=str(run.path), project=re.sub(FORBIDDEN, "_", run.study),
            name=run.name, id=known or secrets.token_hex(4), resume="allow",
            settings=quiet, config=settings, reinit="create_new",
        )  # fmt: skip
        self._log.define_metric(STEP)
        self._log.define_metric("*", step_metric=STEP)
        return str(self._log.id)

    def send(self, rows: Rows) -> None:
        for step, values in rows:
            self._log.log({STEP: step, **values})

    def end(self, run: Run, state: str) -> None:
        from PIL import Image

        if state != "interrupted":
            for key, step, png in heat_map_images(run):
                self._log.log({STEP: step, key: self._image(Image.open(io.BytesIO(png)))})
        self._log.config.update({"state": state}, allow_val_change=True)
        self._log.finish(exit_code=int(state != "done"))
