"""Observers receive the events of a run: a display, a log file, TensorBoard, a test."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

from deepstack.base.errors import PluginError
from deepstack.base.notebook import ProgressBar, in_notebook
from deepstack.base.registry import Registry, refuse_no_name
from deepstack.integrations.tensorboard.events import EventLog
from deepstack.plots.tracked import heat_maps, layer_summaries, settings
from deepstack.records import Run, RunFolder, trouble
from deepstack.records.files import open_log

Row = Mapping[str, float | None]

# The columns of evals.csv that a display shows.
VALIDATION = ("loss", "loss_masked", "unigram_loss", "optimal_loss", "solved")


@dataclass(frozen=True)
class Started:
    """The facts of a run at its start: folder, size, device and reference losses."""

    folder: RunFolder
    label: str
    depths: Sequence[int]  # of each stack
    parameters: int
    first_step: int
    steps: int
    device: str
    references: Mapping[str, float]

    @property
    def layers(self) -> str:
        """Return '6', or '6 + 12' for an encoder and a decoder."""
        return " + ".join(map(str, self.depths))


class Observer:
    """Receives every event of a run; the base class ignores them."""

    def started(self, run: Started) -> None:
        """The model is built; first_step is 1, or the step after the checkpoint."""

    def stepped(self, step: int, row: Row) -> None:
        """A row of steps.csv was written; `step_ms` is the step's time without snapshots."""

    def evaluated(self, step: int, row: Row) -> None:
        """A row of evals.csv was written."""

    def notify(self, line: str) -> None:
        """A message for the user."""

    def finished(self, state: str, step: int) -> None:
        """The run ended, in one of the states of status.json."""


OBSERVERS: Registry[Callable[[], Observer]] = Registry("observer")
"""Observers that every run of this process has, besides its own."""


def observer(name: str) -> Callable[[type[Observer]], type[Observer]]:
    """Decorate a subclass of Observer: every run of this process gets a new object of it."""
    refuse_no_name("observer", name)

    def register(kind: type[Observer]) -> type[Observer]:
        if not (isinstance(kind, type) and issubclass(kind, Observer)):
            raise PluginError(f"the observer {name!r}: expected a subclass of Observer")
        OBSERVERS.register(name, kind)
        return kind

    return register


class Observers(Observer):
    """Passes every event on to several observers."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def pass_on(self, event: str, *values: Any) -> None:
        """Call this method of every observer."""
        for observer in self.observers:
            getattr(observer, event)(*values)

    started = partialmethod(pass_on, "started")
    stepped = partialmethod(pass_on, "stepped")
    evaluated = partialmethod(pass_on, "evaluated")
    notify = partialmethod(pass_on, "notify")
    finished = partialmethod(pass_on, "finished")


class PlainLines(Observer):
    """Prints one line for each event, and for a step at most every `seconds`."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds
        self.run: Started | None = None
        self._shown = time.monotonic()
        self._times: deque[float] = deque(maxlen=50)

    def line(self, text: str) -> None:
        """Print a line; subclasses write it elsewhere."""
        print(text, flush=True)

    def show(self, step: int, steps: int, text: str) -> None:
        """Show the values of a step, and the time that remains."""
        self.line(f"step {step}/{steps}  {text}")

    def started(self, run: Started) -> None:
        self.run = run
        steps = f"steps {run.first_step} to {run.steps}" if run.steps else "the start"
        self.line(
            f"{run.label}, {run.layers} layers, {run.parameters:,} parameters on {run.device}: "
            f"{steps} in {run.folder.path}"
        )

    def stepped(self, step: int, row: Row) -> None:
        now = time.monotonic()
        self._times.append(row["step_ms"] or 0.0)
        if self.run is None or (now - self._shown < self.seconds and step != self.run.steps):
            return
        self._shown = now
        each = statistics.median(self._times)
        left = each * (self.run.steps - step) / 1000
        text = f"loss {number(row['loss'])}  ‖ΔF‖ {number(row['model_update'])}  "
        text += f"‖g‖ {number(row['grad_norm'])}  {each:.{0 if each >= 10 else 1}f} ms/step  "
        text += f"{left:.0f} s left"
        self.show(step, self.run.steps, text)

    def evaluated(self, step: int, row: Row) -> None:
        known = (f"{name} {number(row[name])}" for name in VALIDATION if row.get(name) is not None)
        self.line(f"step {step}  validation {'  '.join(known)}")

    def notify(self, line: str) -> None:
        self.line(line)

    def finished(self, state: str, step: int) -> None:
        self.line(f"{state} at step {step}")


class LogFile(PlainLines):
    """Appends the plain lines to log.txt of the run folder."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.folder = folder

    def line(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        path = self.folder.log_path
        with trouble(path), open_log(path) as file:
            file.write(f"{stamp}  {text}\n".encode("utf-8", "backslashreplace"))


def number(value: float | None) -> str:
    """Return four significant digits, or a dash."""
    return "-" if value is None else f"{value:.4g}"


class NotebookProgress(PlainLines):
    """A bar in the output of the cell, with the latest line."""

    def __init__(self) -> None:
        super().__init__(seconds=0.2)
        self.bar = ProgressBar()

    def started(self, run: Started) -> None:
        self.bar.done, self.bar.total = run.first_step - 1, run.steps
        super().started(run)

    def line(self, text: str) -> None:
        self.bar.show(self.bar.done, self.bar.total, text, last=True)

    def show(self, step: int, steps: int, text: str) -> None:
        self.bar.show(step, steps, text, last=True)

    def notify(self, line: str) -> None:
        print(line)

    def finished(self, state: str, step: int) -> None:
        self.line(f"{state}: {self.bar.text}")  # the last line is of an evaluation


def default_observer() -> Observer:
    """Return the observer of a run without one: a bar in a notebook, else silence."""
    return NotebookProgress() if in_notebook() else Observer()


class TensorBoardLog(Observer):
    """Writes event files into tensorboard/ of the run folder while the run trains."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def started(self, run: Started) -> None:
        self.path = run.folder.path
        first = run.first_step if run.first_step > 1 else 0
        self.events = EventLog(self.path / "tensorboard", first)
        self._open.callback(self.events.close)
        self.last_snapshot = first - 1
        if not first:
            self.events.text(0, "settings", settings(Run(self.path)))

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
            for key, last, png in heat_maps(Run(self.path)):
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
