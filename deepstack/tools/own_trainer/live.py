"""Sends the values of a command to trackers while it runs (`log.to`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deepstack.records import RunFolder
from deepstack.runs import known_trackers, live_logs
from deepstack.tools.own_trainer.metric import Pattern, Value, from_json, lines_of, read_metric

READ_SECONDS = 2.0
READ_SHARE = 0.1  # the part of the time in which outputs are read, at most


class LiveValues:
    """Reads the output of a run again and again, and passes new values on to trackers.

    output, files: the output of the command, and its folder {run}.
    label: the setting's name.
    """

    def __init__(
        self, folder: RunFolder, output: Path, files: Path, trackers: Sequence[str], label: str
    ) -> None:
        from deepstack.training import Started

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
            for log in self.logs:
                getattr(log, event)(one.step, {"loss": one.value})
        now = time.monotonic()
        self.due = now + max(READ_SECONDS, (now - began) / READ_SHARE)

    def finish(self) -> None:
        """Pass the last values on, and the state of the run."""
        self.due = 0.0
        self.read()
        for log in self.logs:
            log.finished(self.folder.read_state(), max(self.steps.values()))
            log.close()


def parse_trackers(value: object) -> tuple[str, ...]:
    """Return the trackers in {to: [NAME]}.  Raises ValueError with the allowed names."""
    names = value.get("to") if isinstance(value, dict) and list(value) == ["to"] else None
    names = [names] if isinstance(names, str) else names
    live = [name for name, tracker in known_trackers().items() if tracker.live is not None]
    if not isinstance(names, list) or any(name not in live for name in names):
        raise ValueError(f"found {value}; allowed {{to: [NAME]}} with {', '.join(live)}")
    return tuple(names)
