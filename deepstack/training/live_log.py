"""Sends the rows of a run to a tracker while the run trains (`log.to`)."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

from deepstack.base.errors import ConfigError, DeepstackError
from deepstack.records import Run
from deepstack.records.files import LARGEST_TEXT, make_folder, parse_object, read, replace
from deepstack.runs.tracked import Scalars, layer_summaries, scalars
from deepstack.training.observer import LogFile, Observer, Row, Started

FLUSH_SECONDS = 5.0
LIVE_KEYS = ("steps/", "evals/", "timing/step_ms")

Rows = Sequence[tuple[int, Scalars]]


class LiveLog(Observer, ABC):
    """Sends the rows of a run to one run of a tracker, however often the run resumes.

    A subclass opens, feeds and ends the tracker's run.

    name: the tracker, and the folder in the run folder.  The file run.json there has the id of the
        tracker's run, and the last step that it has.

    Rows are sent every FLUSH_SECONDS.  A tracker that fails does not end the run: log.txt says
    why, and the rows are sent again later.  Each row is sent once, but for a kill between sending
    and noting the last step: then the rows of that sending are sent twice, and none is lost.
    """

    name: ClassVar[str]

    @abstractmethod
    def open(self, run: Run, known: str | None) -> str:
        """Open the tracker's run with the id `known`, a new one for None; return its id."""

    @abstractmethod
    def send(self, rows: Rows) -> None:
        """Send (step, values by key); the steps do not fall but for those of `layers/` keys."""

    @abstractmethod
    def end(self, run: Run, state: str) -> None:
        """End the tracker's run with the state of the run, after the last row."""

    def started(self, run: Started) -> None:
        self._folder, self._is_open = run.folder, False
        self._path = run.folder.path / self.name / "run.json"
        make_folder(self._path.parent, run.folder.path)
        known = {}
        with suppress(ValueError):
            known = parse_object(read(self._path, LARGEST_TEXT) or b"{}")
        self._sent = self._last = int(known.get("step", -1))
        self._snapshot = int(known.get("snapshot", -1))
        try:
            self._id = self.open(Run(run.folder.path), known.get("id"))
        except DeepstackError:
            raise
        except Exception as error:
            raise ConfigError(f"log.to: {self.name}: {reason(error)}", key="log.to") from error
        self._is_open = True
        first = run.first_step if run.first_step > 1 else 0
        self._pending = [
            (step, {key: value for key, value in values.items() if key.startswith(LIVE_KEYS)})
            for step, values in (scalars(Run(run.folder.path)) if first else [])
            if self._sent < step < first
        ]
        self._add_snapshots(below=first)
        self._snapshot = max(self._snapshot, first - 1)
        self.flush()

    def stepped(self, step: int, row: Row) -> None:
        values = {f"steps/{name}": value for name, value in row.items() if name != "step"}
        if "steps/step_ms" in values:
            values["timing/step_ms"] = values.pop("steps/step_ms")
        self._add(step, values)

    def evaluated(self, step: int, row: Row) -> None:
        self._add(step, {f"evals/{name}": value for name, value in row.items() if name != "step"})
        self._add_snapshots()

    def finished(self, state: str, step: int) -> None:
        self._add_snapshots()
        self.flush()
        self._end(state)

    def close(self) -> None:
        """End the tracker's run if the run has ended by an error."""
        if getattr(self, "_is_open", False):
            self.flush()
            self._end("failed")

    def flush(self) -> None:
        """Send the rows that wait, and write which step the tracker has."""
        self._due = time.monotonic() + FLUSH_SECONDS
        try:
            if self._pending:
                self.send(self._pending)
        except Exception as error:
            self._notify(error)
            return
        self._last = max([self._last, *(step for step, _ in self._pending)])
        self._pending = []
        known = {"id": self._id, "step": self._last, "snapshot": self._snapshot}
        replace(self._path, json.dumps(known).encode(), self._folder.path)

    def _add(self, step: int, values: Row) -> None:
        known = {key: value for key, value in values.items() if value is not None}
        if time.monotonic() >= self._due and all(earlier < step for earlier, _ in self._pending):
            self.flush()  # here all values of the steps before are known
        if step > self._sent and known:
            self._pending.append((step, known))

    def _add_snapshots(self, below: float = float("inf")) -> None:
        """Add the summaries of snapshots that are on the disk and not yet sent."""
        for step, values in layer_summaries(Run(self._folder.path), self._snapshot):
            if step < below:
                self._pending.append((step, values))
                self._snapshot = step

    def _end(self, state: str) -> None:
        self._is_open = False
        try:
            self.end(Run(self._folder.path), state)
        except Exception as error:
            self._notify(error)

    def _notify(self, error: Exception) -> None:
        LogFile(self._folder).notify(f"log.to: {self.name}: {reason(error)}")


def reason(error: Exception) -> str:
    """Return the first line of an error, with its type."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
