"""Observers receive the events of a run: a display, a log file, a tracker, a test."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

from deepstack.base.errors import PluginError
from deepstack.base.notebook import in_notebook
from deepstack.base.progress import LineView, NotebookView, View
from deepstack.base.registry import Registry, refuse_no_name
from deepstack.base.text import number_text
from deepstack.records import RunFolder, trouble
from deepstack.records.files import open_log

Row = Mapping[str, float | None]

# The columns of evals.csv that a display shows.
VALIDATION = ("loss", "loss_masked", "unigram_loss", "optimal_loss", "solved")

# The line of a step.
STEP_LINE = "step {done}/{total}  {text}"


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
    """Shows each event of a run in a view, by default as a printed line.

    seconds: the least time between two steps that it shows.
    """

    def __init__(self, seconds: float = 5.0, view: View | None = None) -> None:
        self.seconds = seconds
        self.view = view or LineView(state=STEP_LINE)
        self.run: Started | None = None
        self._shown = time.monotonic()
        self._times: deque[float] = deque(maxlen=50)

    def line(self, text: str) -> None:
        """Show a line."""
        self.view.line(text)

    def started(self, run: Started) -> None:
        self.run = run
        self.view.begin(run.first_step - 1, run.steps)
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
        text = f"loss {number_text(row['loss'])}  ‖ΔF‖ {number_text(row['model_update'])}  "
        text += f"‖g‖ {number_text(row['grad_norm'])}  {each:.{0 if each >= 10 else 1}f} ms/step  "
        text += f"{left:.0f} s left"
        self.view.show(step, self.run.steps, text)

    def evaluated(self, step: int, row: Row) -> None:
        known = (with_error(row, name) for name in VALIDATION if row.get(name) is not None)
        self.line(f"step {step}  validation {'  '.join(known)}")

    def notify(self, line: str) -> None:
        self.line(line)

    def finished(self, state: str, step: int) -> None:
        self.line(f"{state} at step {step}")


class LogFile(PlainLines):
    """Appends the plain lines to log.txt of the run folder."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(view=LineView(self._append, STEP_LINE))
        self.folder = folder

    def _append(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        path = self.folder.log_path
        with trouble(path), open_log(path) as file:
            file.write(f"{stamp}  {text}\n".encode("utf-8", "backslashreplace"))


def with_error(row: Row, name: str) -> str:
    """Return a column as text: 'loss 2.649 ± 0.021', with its standard error if it has one."""
    error = row.get(f"{name}_se")
    return f"{name} {number_text(row[name])}" + (f" ± {error:.2g}" if error else "")


class NotebookLines(PlainLines):
    """Shows the latest event of a run beside a bar in the output of the cell."""

    def __init__(self) -> None:
        self.bar = NotebookView()
        super().__init__(seconds=0.2, view=self.bar)

    def notify(self, line: str) -> None:
        print(line)

    def finished(self, state: str, step: int) -> None:
        self.line(f"{state}: {self.bar.text}")  # the last line is of an evaluation


def default_observer() -> Observer:
    """Return the observer of a run without one: a bar in a notebook, else silence."""
    return NotebookLines() if in_notebook() else Observer()
