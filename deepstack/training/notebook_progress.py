"""The progress of a run in a notebook."""

from __future__ import annotations

from deepstack.notebook import ProgressBar, in_notebook
from deepstack.training.observer import Observer, Pace, Row, Started, number, validation


class NotebookProgress(Observer):
    """A bar in the output of the cell: step, loss, ‖ΔF‖ and the time that remains."""

    def __init__(self) -> None:
        self.bar, self.pace = ProgressBar(), Pace()
        self.label, self.steps, self.validation = "", 0, ""

    def started(self, run: Started) -> None:
        self.label, self.steps = f"{run.label}, {run.layers} layers", run.steps
        self.bar.show(run.first_step - 1, run.steps, self.label, last=True)

    def stepped(self, step: int, row: Row) -> None:
        self.pace.add(row)
        values = f"loss {number(row['loss'])}  ‖ΔF‖ {number(row['model_update'])}"
        left = self.pace.text(self.steps - step)
        self.bar.show(step, self.steps, f"{self.label}  {values}  {left}".rstrip())

    def evaluated(self, step: int, row: Row) -> None:
        self.validation = f", validation {validation(row)}"

    def notify(self, line: str) -> None:
        print(line)

    def finished(self, state: str, step: int) -> None:
        self.bar.show(step, self.steps, f"{self.label}: {state}{self.validation}", last=True)


def default_observer() -> Observer:
    """Return the observer of a run without one: a bar in a notebook, else silence."""
    return NotebookProgress() if in_notebook() else Observer()
