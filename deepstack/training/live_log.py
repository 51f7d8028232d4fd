"""Sends the rows of a run to a tracker while the run trains (`log.to`)."""

import json
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from deepstack.base.errors import ConfigError, DeepstackError
from deepstack.records import Run
from deepstack.records.files import LARGEST_TEXT, make_folder, parse_object, read, replace
from deepstack.runs.tracked import Scalars, layer_summaries, logged_settings, scalars
from deepstack.training.observer import LogFile, Observer, Row, Started

FLUSH_SECONDS = 5.0
LONGEST_PAUSE = 600.0  # seconds between two tries to reach a tracker that fails
MOST_PENDING = 10_000  # rows that wait for a tracker that fails

KINDS = ("steps", "evals", "layers")
"""The kinds of rows: each has a last step that the tracker has."""
IDENTITY = re.compile(r"[0-9A-Za-z_-]{1,64}")

Rows = Sequence[tuple[int, Scalars]]


class Noted(NamedTuple):
    """What run.json says: the id of the tracker's run, and the last step of each kind of row."""

    identity: str | None
    last: dict[str, int]


class LiveLog(Observer, ABC):
    """Sends the rows of a run to one run of a tracker, however often the run resumes.

    A subclass opens, feeds and ends the tracker's run.

    name: the tracker, and the folder in the run folder.  The file run.json there has the id of the
        tracker's run, and the last steps that it has.
    write_seconds: the longest time in which the tracker writes what it was sent.

    Rows are sent every FLUSH_SECONDS, and noted once the tracker has written them.  A row is sent
    once, but for a kill before it is noted.  A tracker that fails does not end the run: log.txt
    says why, and the rows wait, at most MOST_PENDING of them.
    """

    name: ClassVar[str]
    write_seconds: ClassVar[float] = 0.0

    @abstractmethod
    def open(self, run: Run, known: str | None, settings: Mapping[str, Any]) -> str:
        """Open the tracker's run with the id `known`, a new one for None; return its id."""

    @abstractmethod
    def send(self, rows: Rows) -> None:
        """Send (step, values by key); the steps do not fall but for those of `layers/` keys."""

    @abstractmethod
    def end(self, run: Run, state: str) -> None:
        """End the tracker's run with the state of the run, after the last row."""

    @classmethod
    def forget(cls, folder: Path) -> None:
        """Let the next start of a run folder open a new run of the tracker."""
        (folder / cls.name / "run.json").unlink(missing_ok=True)

    def started(self, run: Started) -> None:
        self._folder, self._is_open = run.folder, False
        self._pending: list[tuple[str, int, Scalars]] = []
        self._pause, self._due, self._is_failing = FLUSH_SECONDS, 0.0, False
        self._snapshot = -1
        self._path = run.folder.path / self.name / "run.json"
        make_folder(self._path.parent, run.folder.path)
        noted = read_noted(self._path)
        if not self._try_to_open(noted):
            return
        first = run.first_step if run.first_step > 1 else 0
        for step, values in scalars(Run(run.folder.path)) if first else []:
            for kind, keys in (("steps", ("steps/", "timing/step_ms")), ("evals", ("evals/",))):
                if step < first:
                    self._add(kind, step, {k: v for k, v in values.items() if k.startswith(keys)})
        self._add_snapshots(below=first)
        self._snapshot = max(self._snapshot, first - 1)
        self.flush()

    def stepped(self, step: int, row: Row) -> None:
        values = {f"steps/{name}": value for name, value in row.items() if name != "step"}
        if "steps/step_ms" in values:
            values["timing/step_ms"] = values.pop("steps/step_ms")
        self._flush_before(step)
        self._add("steps", step, values)

    def evaluated(self, step: int, row: Row) -> None:
        self._flush_before(step)
        values = {f"evals/{name}": value for name, value in row.items() if name != "step"}
        self._add("evals", step, values)
        self._add_snapshots()

    def finished(self, state: str, step: int) -> None:
        self._end(state)

    def close(self) -> None:
        """End the tracker's run if the run has ended by an error."""
        if getattr(self, "_is_open", False):
            self._end("failed")

    def flush(self) -> None:
        """Send the rows that wait, and note which steps the tracker has written."""
        try:
            if self._pending:
                self.send([(step, values) for _, step, values in self._pending])
            for kind, step, _ in self._pending:
                self._last[kind] = max(self._last[kind], step)
            self._pending = []  # they are not sent again, even if they cannot be noted
            self._sent.append((time.monotonic(), dict(self._last)))
            self._note(time.monotonic() - self.write_seconds)
        except Exception as error:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            if not self._is_failing:  # one line for each outage
                self._notify(f"{reason(error)}; rows wait")
            self._is_failing = True
        else:
            self._pause, self._is_failing = FLUSH_SECONDS, False
        self._due = time.monotonic() + self._pause

    def _note(self, until: float) -> None:
        """Note the last steps of what was sent until a time."""
        while len(self._sent) > 1 and self._sent[1][0] <= until:
            self._sent.pop(0)
        text = json.dumps({"id": self._identity, **self._sent[0][1]})
        replace(self._path, text.encode(), self._folder.path)

    def _try_to_open(self, noted: Noted) -> bool:
        """Open the tracker's run, a new one if the known one is gone; return whether it is open.

        Raises ConfigError if a first start finds no tracker.  A resume goes on without it.
        """
        run = Run(self._folder.path)
        settings = {key: value for key, value in logged_settings(run).items() if key != "state"}
        for known in dict.fromkeys((noted.identity, None)):
            try:
                self._identity = self.open(run, known, settings)
            except DeepstackError:
                raise
            except Exception as error:
                if noted.identity is None:
                    text = f"log.to: {self.name}: {reason(error)}"
                    raise ConfigError(text, key="log.to") from error
                self._notify(reason(error))
            else:
                self._last = noted.last if known else dict.fromkeys(KINDS, -1)
                self._first = dict(self._last)  # what the tracker had before this start
                self._sent = [(-math.inf, self._first)]
                self._snapshot = self._last["layers"]
                self._is_open = True
                return True
        return False

    def _flush_before(self, step: int) -> None:
        """Send what waits, if it is time and no value of its steps is still to come."""
        is_whole = not self._pending or self._pending[-1][1] < step
        if self._is_open and is_whole and time.monotonic() >= self._due:
            self.flush()

    def _add(self, kind: str, step: int, values: Row) -> None:
        """Let a row wait, if the tracker does not have it from an earlier start."""
        known = {key: value for key, value in values.items() if value is not None}
        if not self._is_open or not known or step <= self._first[kind]:
            return
        self._pending.append((kind, step, known))
        if len(self._pending) > MOST_PENDING:
            del self._pending[0]

    def _add_snapshots(self, below: float = float("inf")) -> None:
        """Add the summaries of snapshots that are on the disk and not yet sent."""
        if not self._is_open:
            return
        for step, values in layer_summaries(Run(self._folder.path), self._snapshot):
            if step < below:
                self._add("layers", step, values)
                self._snapshot = step

    def _end(self, state: str) -> None:
        if not self._is_open:
            return
        self._add_snapshots()
        self.flush()
        self._is_open = False
        if self._pending:
            self._notify(f"{len(self._pending)} rows were not sent: deepstack export --logs")
        try:
            self.end(Run(self._folder.path), state)
            self._note(math.inf)
        except Exception as error:
            self._notify(reason(error))

    def _notify(self, text: str) -> None:
        with suppress(DeepstackError):  # a full disk ends the run elsewhere
            LogFile(self._folder).notify(f"log.to: {self.name}: {text}")


def read_noted(path: Path) -> Noted:
    """Return what a run has noted; nothing if the file is missing or is not as written."""
    nothing = Noted(None, dict.fromkeys(KINDS, -1))
    try:
        found = parse_object(read(path, LARGEST_TEXT) or b"{}")
    except ValueError:
        return nothing
    identity, last = found.get("id"), {kind: found.get(kind) for kind in KINDS}
    if not isinstance(identity, str) or not IDENTITY.fullmatch(identity):
        return nothing
    if not all(type(step) is int for step in last.values()):
        return nothing
    return Noted(identity, {kind: int(step or 0) for kind, step in last.items()})


def reason(error: Exception) -> str:
    """Return the first line of an error, with its type."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
