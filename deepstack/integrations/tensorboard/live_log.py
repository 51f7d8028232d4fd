"""Event files of TensorBoard while a run trains."""

import secrets
from collections.abc import Mapping
from typing import Any

from deepstack.integrations.tensorboard.events import EventLog
from deepstack.plots import heat_map_images
from deepstack.records import Run
from deepstack.training import LiveLog, Rows


class TensorBoardLog(LiveLog):
    """Writes event files into tensorboard/ of the run folder."""

    name = "tensorboard"

    def open(self, run: Run, known: str | None, settings: Mapping[str, Any]) -> str:
        folder = run.path / self.name
        begins_again = known is None and any(folder.glob("*tfevents*"))
        self._events = EventLog(folder, 0 if begins_again else None)
        if known is None:
            self._events.text(0, "settings", dict(settings))
        return known or secrets.token_hex(4)

    def send(self, rows: Rows) -> None:
        for step, values in rows:
            self._events.scalars(step, values)
        self._events.flush()

    def end(self, run: Run, state: str) -> None:
        if state != "interrupted":
            for key, last, png in heat_map_images(run):
                self._events.picture(last, key, png)
        self._events.close()
