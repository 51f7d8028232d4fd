"""Event files of TensorBoard while a run trains."""

from contextlib import ExitStack

from deepstack.integrations.tensorboard.events import EventLog
from deepstack.plots import heat_map_images
from deepstack.records import Run
from deepstack.runs import layer_summaries, logged_settings
from deepstack.training import Observer, Row, Started


class TensorBoardLog(Observer):
    """Writes event files into tensorboard/ of the run folder while the run trains."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def started(self, run: Started) -> None:
        self.path = run.folder.path
        first = run.first_step if run.first_step > 1 else 0
        folder = self.path / "tensorboard"
        is_again = bool(first) or any(folder.glob("*tfevents*"))
        self.events = EventLog(folder, first if is_again else None)
        self._open.callback(self.events.close)
        self.last_snapshot = first - 1
        if not first:
            self.events.text(0, "settings", logged_settings(Run(self.path)))

    def stepped(self, step: int, row: Row) -> None:
        values = {f"steps/{name}": v for name, v in row.items() if name != "step"}
        values["timing/step_ms"] = values.pop("steps/step_ms", None)
        self.events.scalars(step, values)

    def evaluated(self, step: int, row: Row) -> None:
        values = {f"evals/{name}": v for name, v in row.items() if name != "step"}
        self.events.scalars(step, values)
        self._summarize_layers()

    def finished(self, state: str, step: int) -> None:
        self._summarize_layers()
        if state != "interrupted":
            for key, last, png in heat_map_images(Run(self.path)):
                self.events.picture(last, key, png)
        self.close()

    def close(self) -> None:
        """Close the event file, if one is open."""
        self._open.close()

    def _summarize_layers(self) -> None:
        """Write the summaries of snapshots that are on the disk and not yet written."""
        for step, values in layer_summaries(Run(self.path), self.last_snapshot):
            self.events.scalars(step, values)
            self.last_snapshot = step
