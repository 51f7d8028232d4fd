"""Comparison of two runs of one configuration: the first step and column that differ."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from deepstack.errors import DeepstackError
from deepstack.records.append_log import number_text
from deepstack.records.files import read
from deepstack.records.folder import RunFolder

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


def read_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Return the step and the cells of every complete row of a CSV file; [] without a file."""
    data = read(path) or b""
    lines = data[: data.rfind(b"\n") + 1].decode("ascii", "replace").splitlines()
    rows = csv.DictReader(lines, restval="")
    return [(int(row["step"]), row) for row in rows if row.get("step", "").isdecimal()]


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
    layers = sorted({*old.layer_names(), *new.layer_names()})
    result = [
        *(_log_difference(name, old, new, end) for name in LOGS),
        *(_layers_difference(name, old, new, end) for name in layers),
    ]
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
        one, two = (dict(read_rows(folder.path / name)) for folder in (old, new))
        if one and two:
            count[f"rows of {name}"] = len(one.keys() & two.keys())
    names = [n for n in old.layer_names() if n in new.layer_names()]
    if names:
        steps, others = (set(folder.read_layers(names[0])[0].tolist()) for folder in (old, new))
        count["files of layers"] = len(names)
        count["records in each"] = len(steps & others)
    return count


def _log_difference(name: str, old: RunFolder, new: RunFolder, end: float) -> Difference | None:
    """Return the first row that differs, or a column that only one of the logs has."""
    one, two = read_rows(old.path / name), read_rows(new.path / name)
    if one and two:
        columns, others = one[0][1].keys(), two[0][1].keys()
        if alone := [c for c in (*columns, *others) if c not in columns or c not in others]:
            return Difference(None, name, f"column {alone[0]}", *_presence(alone[0] in columns))
    return _first_difference(name, one, two, end, row_difference)


def _layers_difference(name: str, old: RunFolder, new: RunFolder, end: float) -> Difference | None:
    """Return the first record and layer in which a diagnostic differs."""
    file = f"layers/{name}.npy"
    records: list[list[tuple[int, np.ndarray]]] = []
    for folder in (old, new):
        try:
            steps, values = folder.read_layers(name)
        except KeyError:
            return Difference(None, file, "the file", *_presence(folder is new))
        except DeepstackError as error:
            return Difference(None, file, "the file", str(error), PRESENT)
        records.append(list(zip(steps.tolist(), values, strict=True)))
    one, two = records
    if end < float("inf"):  # a killed run may lack its last records
        end = min(end, one[-1][0] if one else 0)
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
    return f"layer {layer + 1}", number_text(old[layer]), number_text(new[layer])


def _first_difference(
    file: str,
    old: Sequence[tuple[int, Row]],
    new: Sequence[tuple[int, Row]],
    end: float,
    differ: Callable[[Row, Row], Cells | None],
) -> Difference | None:
    """Return the first pair of rows that differs, or a row that only one of the runs has."""
    for was, now in zip_longest(old, new):
        if was and now and was[0] == now[0]:
            if cells := differ(was[1], now[1]):
                return Difference(was[0], file, *cells)
        else:
            step = min(row[0] for row in (was, now) if row)
            in_old = was is not None and was[0] == step
            return Difference(step, file, "the row", *_presence(in_old)) if step <= end else None
    return None


def _presence(in_old: bool) -> tuple[str, str]:
    """Return the texts of both runs for something that only one of them has."""
    return (PRESENT, ABSENT) if in_old else (ABSENT, PRESENT)
