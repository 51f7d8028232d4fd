"""Sends the values of a command to trackers while it runs (`log.to`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deepstack.base import DeepstackError
from deepstack.records import RunFolder
from deepstack.runs import known_trackers, live_logs
from deepstack.tools.own_trainer.metric import Pattern, Value, from_json, lines_of, read_metric

READ_SECONDS = 2.0
READ_SHARE = 0.1  # the part of the time in which outputs are read, at most


class LiveValues:
    """Reads the output of a run again and again, and passes new values on to trackers.

    output, files: the output of the command, and its folder {run}.
    label: the setting's name.
    keep: whether the command goes on from an earlier start.  Without it, its values are others,
        and each start has a run of the tracker of its own.

    A tracker that fails is left out; log.txt says why.
    """

    def __init__(
        self,
        folder: RunFolder,
        output: Path,
        files: Path,
        trackers: Sequence[str],
        label: str,
        *,
        keep: bool,
    ) -> None:
        from deepstack.training import LiveLog, Started

        known = folder.read_meta()["trainer"]
        self.folder, self.output, self.files = folder, output, files
        self.metric, self.loss = from_json(known["metric"]), from_json(known["loss"])
        self.since = folder.status_path.stat().st_mtime_ns
        self.steps = {"stepped": -1, "evaluated": -1}  # the last one that trackers have
        self.due = time.monotonic()
        self.logs = [make() for make in live_logs(trackers)]
        start: dict[str, Any] = {"folder": folder, "label": label, "depths": [], "parameters": 0}
        start |= {"first_step": 1, "steps": 0, "device": "", "references": {}}
        for log in self.logs:
            if isinstance(log, LiveLog) and not keep:
                log.forget(folder.path)
            log.started(Started(**start))

    def read(self) -> None:
        """Pass the new values on, if it is time."""
        began = time.monotonic()
        if began < self.due:
            return
        new: list[tuple[Value, str]] = []
        if isinstance(self.loss, Pattern):
            new += [(one, "stepped") for one in self.loss.values(lines_of(self.output))]
        with suppress(ValueError):  # no value yet
            assert self.metric is not None
            values = read_metric(self.metric, self.output, self.files, self.since)
            new += [(one, "evaluated") for one in values]
        new = [(one, event) for one, event in new if one.step > self.steps[event]]
        for one, event in sorted(new, key=lambda pair: (pair[0].step, pair[1] == "evaluated")):
            self.steps[event] = one.step
            self._tell(event, one.step, {"loss": one.value})
        now = time.monotonic()
        self.due = now + max(READ_SECONDS, (now - began) / READ_SHARE)

    def finish(self) -> None:
        """Pass the last values on, and the state of the run."""
        self.due = 0.0
        self.read()
        self._tell("finished", self.folder.read_state(), max(self.steps.values()))

    def _tell(self, event: str, *values: Any) -> None:
        """Pass an event on to every tracker, and leave out those that fail."""
        from deepstack.training import LogFile

        for log in list(self.logs):
            try:
                getattr(log, event)(*values)
            except Exception as error:  # the command goes on
                self.logs.remove(log)
                with suppress(DeepstackError):
                    LogFile(self.folder).notify(f"log: {type(error).__name__}: {error}")


def parse_trackers(value: object) -> tuple[str, ...]:
    """Return the trackers in {to: [NAME]}.  Raises ValueError with the allowed names."""
    names = value.get("to") if isinstance(value, dict) and list(value) == ["to"] else None
    names = [names] if isinstance(names, str) else names
    live = [name for name, tracker in known_trackers().items() if tracker.live is not None]
    if not isinstance(names, list) or any(name not in live for name in names):
        raise ValueError(f"found {value}; allowed {{to: [NAME]}} with {', '.join(live)}")
    return tuple(names)
