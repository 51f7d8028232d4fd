"""Comparison of two runs of one configuration: the first step and column that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from deepstack.errors import DeepstackError
from deepstack.records.append_log import number_text
from deepstack.records.checksums import mapping
from deepstack.records.files import read
from deepstack.records.folder import RunFolder
from deepstack.records.run import flatten

if TYPE_CHECKING:
    import numpy as np

LOGS = (
    "steps.csv",
    "attribution.csv",
    "first_order.csv",
    "noise_scale.csv",
    "sharpness.csv",
    "evals.csv",
)
ABSENT, PRESENT = "not there", "there"
# Keys of JSON files that charts and tables use: numbers, symbols, units, names.
COMPARED_KEYS = {
    "meta.json": ("seed", "parameters", "references"),
    "columns.json": (
        "f0_norm", "references", "stacks", "columns", "layers", "attribution", "scheme", "defaults",
    ),
}  # fmt: skip
# A later version may word these sentences differently.
SENTENCES = ("description", "equation", "paper")

Row = TypeVar("Row")
Cells = tuple[str, str, str]  # the column, and the texts of both runs


@dataclass(frozen=True)
class Difference:
    """A place where two runs differ.

    step: None if it has none, such as a column that only one run has.  column: of a table, or
    'layer 3' of a file of layers, or the name of a tensor.  recorded, now: both values as text.
    """

    step: int | None
    file: str
    column: str
    recorded: str
    now: str

    @property
    def place(self) -> str:
        """The place in words: 'step 2 of steps.csv, column loss'."""
        step = "" if self.step is None else f"step {self.step} of "
        return f"{step}{self.file}, {self.column}"


@dataclass(frozen=True)
class Table:
    """A CSV file as text: its columns, and its complete rows by step."""

    columns: tuple[str, ...]
    rows: dict[int, dict[str, str]]

    @property
    def last(self) -> int | None:
        """The step of the last row; None without rows."""
        return max(self.rows, default=None)


def read_table(path: Path) -> Table:
    """Return the complete rows of a CSV file; an empty table if there is no file."""
    data = read(path) or b""
    lines = data[: data.rfind(b"\n") + 1].decode("ascii", "replace").splitlines()
    columns = tuple(lines[0].split(",")) if lines else ()
    cells = (line.split(",") for line in lines[1:])
    rows = {int(row[0]): dict(zip(columns, row, strict=False)) for row in cells if _number(row[0])}
    return Table(columns, rows)


def row_difference(old: Mapping[str, str], new: Mapping[str, str]) -> Cells | None:
    """Return the first common column whose texts differ, with both texts."""
    for column, text in old.items():
        if column in new and new[column] != text:
            return f"column {column}", text, new[column]
    return None


def differences(old: RunFolder, new: RunFolder, end: float) -> list[Difference]:
    """Return the first difference of every log and file of layers, the earliest first.

    end: up to this step both runs must have every row and record; after it only common ones are
    compared.
    """
    result: list[Difference | None] = []
    for name in LOGS:
        one, two = read_table(old.path / name), read_table(new.path / name)
        rows = _first_difference(name, one.rows, two.rows, end, row_difference)
        result.append(rows)
        alone = [
            c for c in (*one.columns, *two.columns) if c not in one.columns or c not in two.columns
        ]
        if alone and one.columns and two.columns:
            presence = _presence(alone[0] in one.columns)
            result.append(Difference(None, name, f"column {alone[0]}", *presence))
        elif not rows:
            result.append(_lines_difference(name, old, new, end))
    for name in sorted({*old.layer_names(), *new.layer_names()}):
        result.append(_layers_difference(name, old, new, end))
    result += [_json_difference(name, old, new) for name in COMPARED_KEYS]
    return sorted((d for d in result if d is not None), key=earliest)


def earliest(difference: Difference) -> tuple[float, int]:
    """Return a sorting key: the step, then the order in which a step writes its files."""
    step = float("inf") if difference.step is None else difference.step
    name = difference.file.split("/")[0]
    rank = (*LOGS[:1], "layers", *LOGS[1:])
    return step, rank.index(name) if name in rank else len(rank)


def compared(old: RunFolder, new: RunFolder) -> dict[str, int]:
    """Count what two runs have in common: rows of each log, files of layers, their records."""
    count: dict[str, int] = {}
    for name in LOGS:
        one, two = read_table(old.path / name), read_table(new.path / name)
        if one.rows and two.rows:
            count[f"rows of {name}"] = len(one.rows.keys() & two.rows.keys())
    names = [n for n in old.layer_names() if n in new.layer_names()]
    if names:
        steps, others = (set(folder.read_layers(names[0])[0].tolist()) for folder in (old, new))
        count["files of layers"] = len(names)
        count["records in each"] = len(steps & others)
    return count


def _json_difference(name: str, old: RunFolder, new: RunFolder) -> Difference | None:
    """Return the first value of a JSON file that charts use and that differs between the runs."""
    one, two = (_flat_json(folder.path / name) for folder in (old, new))
    for key in one:
        words = key.split(".")
        is_used = words[0] in COMPARED_KEYS[name] and words[-1] not in SENTENCES
        if is_used and key in two and one[key] != two[key]:
            return Difference(None, name, key, repr(one[key]), repr(two[key]))
    return None


def _flat_json(path: Path) -> dict[str, Any]:
    """Return the values of a JSON file by dotted key; empty if it cannot be read."""
    try:
        return dict(flatten(mapping(path)))
    except (OSError, ValueError):  # `inspect` reports it
        return {}


def _lines_difference(name: str, old: RunFolder, new: RunFolder, end: float) -> Difference | None:
    """Return the first line that differs of logs with equal rows: a row twice, a torn one."""
    one, two = (
        (read(folder.path / name) or b"").decode("ascii", "replace").split("\n")
        for folder in (old, new)
    )
    # The last line of a killed run may be torn, and one log may go further.
    shared = None if end == float("inf") else min(len(one), len(two)) - 1
    lines = zip_longest(one[:shared], two[:shared], fillvalue=ABSENT)
    for number, (was, now) in enumerate(lines, start=1):
        if was != now:
            return Difference(None, name, f"line {number}", was, now)
    return None


def _layers_difference(name: str, old: RunFolder, new: RunFolder, end: float) -> Difference | None:
    """Return the first record and layer in which a diagnostic differs."""
    file = f"layers/{name}.npy"
    records: list[dict[int, np.ndarray]] = []
    for folder in (old, new):
        try:
            steps, values = folder.read_layers(name)
        except KeyError:
            return Difference(None, file, "the file", *_presence(folder is new))
        except DeepstackError as error:
            return Difference(None, file, "the file", str(error), PRESENT)
        records.append(dict(zip(steps.tolist(), values, strict=True)))
        if len(records[-1]) != len(values):  # two records of one step: only one was compared
            return Difference(None, file, "the steps", "one twice", "each once")
    one, two = records
    if end < float("inf"):  # a killed run may lack its last records
        end = min(end, max(one, default=0))
    return _first_difference(file, one, two, end, _layer_difference)


def _layer_difference(old: np.ndarray, new: np.ndarray) -> Cells | None:
    """Return the first layer whose number differs in any bit."""
    import numpy as np

    if old.shape != new.shape or old.dtype != new.dtype:
        return "shape", f"{old.dtype} {old.shape}", f"{new.dtype} {new.shape}"
    if old.tobytes() == new.tobytes():
        return None
    differing = [a.tobytes() != b.tobytes() for a, b in zip(old, new, strict=True)]
    layer = int(np.argmax(differing))
    one, two = number_text(old[layer]), number_text(new[layer])
    if one == two:  # different NaNs have the same text
        one, two = old[layer].tobytes().hex(), new[layer].tobytes().hex()
    return f"layer {layer + 1}", one, two


def _first_difference(
    file: str,
    old: Mapping[int, Row],
    new: Mapping[int, Row],
    end: float,
    differ: Callable[[Row, Row], Cells | None],
) -> Difference | None:
    """Return the first step whose rows differ, or that only one of the runs has."""
    for step in sorted(old.keys() | new.keys()):
        if step in old and step in new:
            if cells := differ(old[step], new[step]):
                return Difference(step, file, *cells)
        elif step <= end:
            return Difference(step, file, "the row", *_presence(step in old))
    return None


def _presence(in_old: bool) -> tuple[str, str]:
    """Return the texts of both runs for something that only one of them has."""
    return (PRESENT, ABSENT) if in_old else (ABSENT, PRESENT)


def _number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
