"""The values of a run: lines of its output that match a pattern, or a file that it writes.

A value is the number at the place of the pattern's group, to its end: `([0-9.]+)` reads 1.2e-05
whole, and `nan` where a number may stand, so that a run that diverged does not keep an older value.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from deepstack.base import ResourceError, shorten
from deepstack.records import LARGEST_TEXT, open_file, read

STEP = "step"
NUMBER = r"[-+]?(?:nan|inf(?:inity)?|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
NUMBER_HERE = re.compile(NUMBER, re.IGNORECASE)
NOT_FINITE = r"[-+]?(?:[nN][aA][nN]|[iI][nN][fF](?:[iI][nN][iI][tT][yY])?)"
ENDINGS = (".json", ".jsonl", ".csv")
LARGEST = 3.4e38  # of the numbers that logs hold
LONGEST_SHOWN = 120  # characters of a line in a message
LONGEST_LINE = 2**16  # characters of a line in which a pattern is looked for


class Value(NamedTuple):
    """A value after a step, which is the number of the value where the output names none."""

    step: int
    value: float


@dataclass(frozen=True)
class Pattern:
    """A regular expression with a group for the value, and maybe a group named step."""

    text: str

    @property
    def group(self) -> int:
        """The number of the group of the value: the first one that is not named step."""
        known = re.compile(self.text)
        step = known.groupindex.get(STEP)
        return next(number for number in range(1, known.groups + 1) if number != step)

    @property
    def has_step(self) -> bool:
        return STEP in re.compile(self.text).groupindex

    def values(self, lines: Iterable[str]) -> list[Value]:
        """Return the values of all matches, with rising steps."""
        reads_nan = re.compile(with_nan(self.text, self.group))
        group, has_step = self.group, self.has_step
        found: list[tuple[int | None, float]] = []
        for line in lines:
            for match in reads_nan.finditer(line[:LONGEST_LINE]):
                value = number_at(line, match.start(group))
                if value is None:
                    continue
                step = match[STEP] if has_step else None
                found.append((whole(step), value))
        return rising(found)


@dataclass(frozen=True)
class MetricFile:
    """A file that the command writes below {run}: JSON, a JSON object a line, or CSV.

    key: of the value; of JSON inside others with dots.
    """

    name: str
    key: str

    def values(self, path: Path) -> list[Value]:
        """Return the values in the file at a path.  Raises ValueError if it has none."""
        found = [
            (whole(inner(row, STEP)), value)
            for row in self.rows(path)
            if (value := real(inner(row, self.key))) is not None
        ]
        if not found:
            raise ValueError(f"{self.name} has no number as {self.key!r}")
        return rising(found)

    def names(self, path: Path) -> list[str]:
        """Return the names of the numbers in the file at a path; none if it cannot be read."""
        try:
            rows = [row for row in self.rows(path) if isinstance(row, dict)]
        except ValueError:
            return []
        return list(dict.fromkeys(k for row in rows for k in row if real(row[k]) is not None))

    def rows(self, path: Path) -> list[Any]:
        """Return the rows of the file at a path.  Raises ValueError if it cannot be read."""
        text = (read(path, LARGEST_TEXT) or b"").decode("utf-8", "replace")
        ending = PurePosixPath(self.name).suffix
        rows: list[Any]
        try:
            if ending == ".csv":
                rows = list(csv.DictReader(io.StringIO(text)))
            elif ending == ".jsonl":
                rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            else:
                rows = [json.loads(text)]
        except (ValueError, RecursionError, csv.Error) as error:
            raise ValueError(f"{self.name} cannot be read ({error})") from None
        return rows


Metric = Pattern | MetricFile


def parse_pattern(text: str) -> Pattern:
    """Return the pattern in a text.  Raises ValueError with what is allowed."""
    try:
        known = re.compile(text)
    except re.error as error:
        raise ValueError(f"found what is no regular expression: {error}") from None
    others = [name for name in known.groupindex if name not in (STEP, "value")]
    if others or known.groups - (STEP in known.groupindex) != 1:
        raise ValueError(
            f"found {known.groups} groups; allowed one for the value, as in 'val loss ([0-9.]+)', "
            "and one named step: 'step (?P<step>[0-9]+): val loss ([0-9.]+)'"
        )
    pattern = Pattern(text)
    re.compile(with_nan(text, pattern.group))
    return pattern


def with_nan(pattern: str, group: int) -> str:
    """Return a pattern whose group of this number matches a NaN and infinities too."""
    start, end = span_of_group(pattern, group)
    return f"{pattern[:start]}(?:{pattern[start:end]}|{NOT_FINITE}){pattern[end:]}"


def span_of_group(pattern: str, group: int) -> tuple[int, int]:
    """Return the start and the end of what a capturing group of a valid pattern encloses."""
    opened: list[tuple[int, int]] = []  # number of each open group, 0 for others, and its start
    at, number, in_class = 0, 0, False
    while at < len(pattern):
        sign = pattern[at]
        if sign == "\\":
            at += 2
            continue
        if in_class:
            in_class = sign != "]"
        elif sign == "[":
            in_class = True
            at += pattern[at + 1 : at + 2] == "^"
            at += pattern[at + 1 : at + 2] == "]"  # a bracket that comes first is a member
        elif sign == "(":
            named = re.compile(r"\(\?P<\w+>").match(pattern, at)
            captures = named is not None or pattern[at + 1 : at + 2] != "?"
            number += captures
            opened.append((number if captures else 0, named.end() if named else at + 1))
        elif sign == ")":
            which, start = opened.pop()
            if which == group:
                return start, at
        at += 1
    raise ValueError(f"found no group {group}")


def number_at(line: str, start: int) -> float | None:
    """Return the number at a place of a line, with the sign before it; None for none."""
    if start > 0 and line[start - 1] in "+-" and (start == 1 or line[start - 2] in " \t:=(,"):
        start -= 1
    match = NUMBER_HERE.match(line, start)
    return float(match[0]) if match else None


def rising(found: Iterable[tuple[int | None, float]]) -> list[Value]:
    """Return values with rising steps, the last one last.

    A value without a step follows the one before it.  A step that is not above the one before it
    begins anew there, as after a trainer has loaded its checkpoint.  A value that logs, which
    are of float32, do not hold is infinite.
    """
    values: list[Value] = []
    for step, number in found:
        value = math.copysign(math.inf, number) if abs(number) > LARGEST else number
        if step is None:
            step = values[-1].step + 1 if values else 1
        while values and values[-1].step >= step:
            values.pop()
        values.append(Value(step, value))
    return values


def lines_of(*paths: Path) -> Iterator[str]:
    """Yield the lines of outputs; a bar that is drawn again over itself has several."""
    for path in paths:
        with (
            suppress(FileNotFoundError),
            io.TextIOWrapper(open_file(path), encoding="utf-8", errors="replace") as text,
        ):
            yield from text


def end_of(output: Path) -> str:
    """Return the last line of an output that has a number, or that there is none."""
    last = ""
    for line in lines_of(output):
        if re.search("[0-9]", line):
            last = line.strip()
    if not last:
        return "it has no line with a number"
    return f"its last line with a number: {shorten(last, LONGEST_SHOWN)!r}"


def inner(row: Any, key: str) -> Any:
    """Return the value at a key of an object, or at a dotted key inside of it; None for none."""
    if isinstance(row, dict) and key in row:
        return row[key]
    for part in key.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def real(value: Any) -> float | None:
    """Return a number, or a text of one, as a float; None for anything else."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def whole(value: Any) -> int | None:
    """Return a finite number from 0 on as an int; None for anything else."""
    number = real(value)
    return int(number) if number is not None and math.isfinite(number) and number >= 0 else None


def read_metric(
    metric: Metric, output: Path, files: Path, since: int, earlier: Sequence[Path] = ()
) -> list[Value]:
    """Return the values of a run.

    files: the folder {run}.
    earlier: outputs of the starts that this one continues, whose values come first.
    since: time in nanoseconds of the start, before which a file belongs to an earlier start.

    Raises ValueError, for one line, if there is none.
    """
    if isinstance(metric, Pattern):
        values = metric.values(lines_of(*earlier, output))
        if not values:
            raise ValueError(
                f"no line of {output.name} matches the metric {metric.text!r}; {end_of(output)}"
            )
        return values
    path = files / metric.name
    try:
        if not path.is_file() or path.stat().st_mtime_ns < since:
            raise ValueError(f"the command has not written {metric.name} into {{run}}")
        return metric.values(path)
    except (OSError, ResourceError) as error:
        raise ValueError(f"{metric.name} cannot be read ({error})") from None


def as_json(metric: Metric | None) -> dict[str, str] | None:
    """Return a metric as meta.json has it."""
    if metric is None:
        return None
    if isinstance(metric, Pattern):
        return {"pattern": metric.text}
    return {"file": metric.name, "key": metric.key}


def from_json(value: dict[str, str] | None) -> Metric | None:
    """Return the metric that `as_json` wrote."""
    if value is None:
        return None
    if "pattern" in value:
        return Pattern(value["pattern"])
    return MetricFile(value["file"], value["key"])
