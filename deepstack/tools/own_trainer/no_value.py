"""Starts no further run of a study whose metric has read no value from a run that ended well."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from deepstack.base import ConfigError, ResourceError, counted, quote, shorten
from deepstack.records import ENDED, RunFolder, visible_folders
from deepstack.sweeps import CellProgress
from deepstack.tools.own_trainer.command_file import CommandFile
from deepstack.tools.own_trainer.metric import (
    ENDINGS,
    LONGEST_SHOWN,
    NUMBER,
    Metric,
    Pattern,
    lines_of,
)
from deepstack.tools.own_trainer.record import FILES, OUTPUT

LINES_SHOWN, LINES_READ = 5, 200
# words and signs before a number: 'step 10: val loss '
BEFORE_NUMBER = re.compile(rf"([A-Za-z_][\w/@ -]{{0,40}}[:= ]+)(?:{NUMBER})", re.IGNORECASE)
LIKELY = (("val", "eval", "test"), ("loss",), ("",))
"""Words in the name of a value, from the likeliest name of a validation loss on."""


@dataclass
class MetricWatch:
    """Whether the metric of a study has read a value from any of its runs.

    file: the study.
    folder: the study's folder, whose earlier runs count too.
    without: the first run that ended with exit code 0 and without a value.
    """

    file: CommandFile
    folder: Path
    has_value: bool = False
    without: RunFolder | None = None
    _seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.has_value = any(self._values(RunFolder(p)) for p in visible_folders(self.folder))

    def may_start(self, progress: Sequence[CellProgress]) -> bool:
        """Return False once a run has ended well without a value, unless another run has one."""
        for entry in () if self.has_value else progress:
            folder, has_ended = entry.cell.folder, entry.state in (*ENDED, "failed")
            if has_ended and entry.process is None and folder.name not in self._seen:
                self._seen.add(folder.name)
                values = self._values(folder)
                self.has_value |= bool(values)
                if values == 0 and entry.state == "failed":
                    self.without = self.without or folder
        return self.has_value or self.without is None

    def refuse(self, path: Path, left: int) -> None:
        """Raise ConfigError if a run has ended well without a value, and none has one.

        path: the study's file.
        left: number of runs that were not started.
        """
        if self.has_value or self.without is None:
            return
        runs = f"; {counted('{} runs', left)} not started" if left else ""
        raise ConfigError(f"{path}: metric: {advice(self.file.metric, self.without)}{runs}")

    def _values(self, folder: RunFolder) -> int | None:
        """Return the number of values of a run that ended with exit code 0, or that has some.

        None for other runs, and for one with another metric.
        """
        with suppress(ResourceError):
            known = folder.read_meta().get("trainer", {})
            metrics = self.file.metrics()
            if "exit_code" in known and all(known.get(key) == metrics[key] for key in metrics):
                ended = 1 if folder.read_state() in ENDED else None  # without a number of values
                values = known.get("values", ended)
                return values if values or known["exit_code"] == 0 else None
        return None


def advice(metric: Metric, run: RunFolder) -> str:
    """Return the end of the output of a run without a value, and the metric to write instead."""
    then = "then repeat the command, which reads this output again"
    if not isinstance(metric, Pattern):
        files = run.path / FILES
        candidates = [path for path in sorted(files.rglob("*")) if path.suffix in ENDINGS]
        names = ", ".join(quote(path.relative_to(files).as_posix()) for path in candidates[:5])
        if numbers := metric.names(files / metric.name):
            names += f" with the numbers {', '.join(numbers[:5])}"
        return (
            f"the command ended with exit code 0 and {files}/{metric.name} has no value "
            f"{metric.key!r}; found {names or 'no such file'} there; allowed {{file: NAME, key: "
            f"NAME}} of a file that the command writes into {{run}}; {then}"
        )
    output = run.path / OUTPUT
    last = list(deque((line for line in map(str.strip, lines_of(output)) if line), LINES_READ))
    lines = "".join(f"\n    {shorten(line, LONGEST_SHOWN)}" for line in last[-LINES_SHOWN:])
    shown = f", which ends with{lines}\n" if lines else ", which is empty; "
    return (
        f"the command ended with exit code 0 and no line matches {metric.text!r} in {output}{shown}"
        f"allowed a pattern of a line with the value, such as '{pattern_for(last)}'; {then}"
    )


def pattern_for(lines: Sequence[str]) -> str:
    """Return a pattern of the likeliest validation loss in an output, or an example."""
    names = [match[1].strip() for line in lines for match in BEFORE_NUMBER.finditer(line[:2000])]
    for words in LIKELY:
        for name in reversed(names):
            if any(word in name.lower() for word in words):
                return re.sub(r"\s+", " +", name) + r" *([0-9.]+)"
    return "val loss ([0-9.]+)"
