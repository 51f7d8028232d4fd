"""Runs of trackio while a run trains."""

import io
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

from deepstack.integrations.trackio.client import trackio_in
from deepstack.plots import heat_map_images
from deepstack.records import Run, refuse_links_below
from deepstack.training import LiveLog, Rows


class TrackioLog(LiveLog):
    """Writes a database of trackio into trackio/ of the run folder, or into $TRACKIO_DIR.

    trackio has one folder for each process: a process that trains several runs needs $TRACKIO_DIR.
    """

    name = "trackio"
    write_seconds = 5.0  # a thread of its own writes

    def open(self, run: Run, known: str | None, settings: Mapping[str, Any]) -> str:
        refuse_links_below(run.path / self.name)
        self._trackio = trackio_in(os.environ.get("TRACKIO_DIR", run.path / self.name))
        with redirect_stdout(sys.stderr):
            self._log = self._trackio.init(
                project=run.study, name=run.name, config=dict(settings), embed=False,
                resume="never" if known is None else "must", auto_log_gpu=False, auto_log_cpu=False,
            )  # fmt: skip
        return str(self._log.id)

    def send(self, rows: Rows) -> None:
        for step, values in rows:
            self._log.log(values, step=step)

    def end(self, run: Run, state: str) -> None:
        from PIL import Image

        if state != "interrupted":
            for key, step, png in heat_map_images(run):
                picture = self._trackio.Image(Image.open(io.BytesIO(png)))
                self._log.log({key: picture}, step=step)
        with redirect_stdout(sys.stderr):
            self._log.finish()
