"""Runs of W&B while a run trains."""

import io
import os
import re
import secrets
from collections.abc import Mapping
from typing import Any

from deepstack.integrations.wandb.client import FORBIDDEN, quiet_wandb
from deepstack.plots import heat_map_images
from deepstack.records import Run
from deepstack.training import LiveLog, Rows

STEP = "step"  # the key of the horizontal axis: a summary of layers comes after later steps


class WandbLog(LiveLog):
    """Writes an offline run of W&B into wandb/ of the run folder; $WANDB_MODE=online sends it."""

    name = "wandb"
    write_seconds = 20.0  # a process of its own writes every 15 s

    def open(self, run: Run, known: str | None, settings: Mapping[str, Any]) -> str:
        wandb, quiet = quiet_wandb()
        self._image = wandb.Image
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._log = wandb.init(
            mode=mode, dir=str(run.path), project=re.sub(FORBIDDEN, "_", run.study),
            name=run.name, id=known or secrets.token_hex(4), resume="allow",
            settings=quiet, config=dict(settings), reinit="create_new",
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
