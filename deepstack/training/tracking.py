"""Passes the events of a run on to TensorBoard (`log.to`)."""

from __future__ import annotations

from collections.abc import Mapping

from deepstack.records import Run, RunFolder
from deepstack.trackers import (
    EventLog,
    heat_maps,
    layer_summaries,
    settings,
)
from deepstack.training.observer import Observer, Row, Started


class TensorBoardLog(Observer):
    """Writes event files into tensorboard/ of the run folder while the run trains."""

    def __init__(self) -> None:
        self.events: EventLog | None = None
        self.folder: RunFolder | None = None
        self.last_snapshot = -1

    def started(self, run: Started) -> None:
        self.folder = run.folder
        first = run.first_step if run.first_step > 1 else 0
        self.events = EventLog(run.folder.path / "tensorboard", first)
        self.last_snapshot = first - 1
        if not first:
            self.events.text(0, "settings", settings(Run(run.folder.path)))

    def stepped(self, step: int, row: Row) -> None:
        values = {f"steps/{name}": v for name, v in row.items() if name != "step"}
        values["timing/step_ms"] = values.pop("steps/step_ms", None)
        self._scalars(step, values)

    def evaluated(self, step: int, row: Row) -> None:
        self._scalars(step, {f"evals/{name}": v for name, v in row.items() if name != "step"})
        self._summarize_layers()

    def finished(self, state: str, step: int) -> None:
        self._summarize_layers()
        if self.events and self.folder and state != "interrupted":
            for key, last, png in heat_maps(Run(self.folder.path)):
                self.events.picture(last, key, png)
        self.close()

    def close(self) -> None:
        """Close the event file, if one is open."""
        if self.events:
            self.events.close()
        self.events = None

    def _scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        if self.events:
            self.events.scalars(step, values)

    def _summarize_layers(self) -> None:
        """Write the summaries of snapshots that are on the disk and not yet written."""
        if self.folder:
            for step, values in layer_summaries(Run(self.folder.path), self.last_snapshot):
                self._scalars(step, values)
                self.last_snapshot = step
