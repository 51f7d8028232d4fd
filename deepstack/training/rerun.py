"""Trains a run again from its own record and compares the two row by row."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from deepstack import config as conf
from deepstack.errors import DifferenceError, Interrupted, NothingMatchedError
from deepstack.interrupts import Stop
from deepstack.records import ENDED, RunFolder, damage, number_text, problems
from deepstack.records.comparison import (
    Difference,
    Table,
    compared,
    differences,
    earliest,
    read_table,
    row_difference,
)
from deepstack.records.published import is_published
from deepstack.training import checkpoint as ckpt
from deepstack.training.environment import (
    git_state,
)
from deepstack.training.loop import train
from deepstack.training.observer import Observer, Observers, Row, Started
from deepstack.training.preflight import recorded_config


@dataclass(frozen=True)
class Comparison:
    """The result of training a run again.

    differences: the first one of every file, the earliest first; empty if all is identical.
    compared: the number of compared rows, files and tensors.  upto: the last recorded step of a run
    that has not ended, else None.  changes: differences between the environments.  damage: problems
    of the record itself.  code: both commits, if they differ.
    """

    differences: list[Difference]
    compared: dict[str, int]
    upto: int | None = None
    changes: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    code: str = ""


def check(
    run: str | Path,
    *,
    observer: Observer | None = None,
    stop: Stop = lambda: None,
    allow_env_change: bool = False,
) -> Comparison:
    """Train a run again in a temporary folder, up to the first row that differs.

    Compares steps.csv, evals.csv, attribution.csv, the layers and the newest common checkpoint,
    byte for byte; for a run that has not ended, up to its last row.  Raises the errors of `train`
    and `recorded_config`, and NothingMatchedError for a record without rows.
    """
    record = RunFolder(run)
    config, changes = recorded_config(record, allow_env_change)
    state = record.read_status().get("state")
    upto = None if state in ENDED else last_step(record)
    # Only the last checkpoint is of use, and their interval changes no number.
    config = conf.with_overrides(config, {"runtime.checkpoint_seconds": 1e9})
    comparer = Comparer(record, observer or Observer(), upto, stop)
    with tempfile.TemporaryDirectory(prefix="deepstack-") as folder:
        end = float("inf") if upto is None else upto - 1.0
        try:
            train(
                config,
                study="rerun",
                out=folder,
                observer=comparer,
                stop=comparer.stop_signal,
                allow_env_change=True,
            )
        except RowDifferenceError as error:
            end = error.step - 1.0
        except Interrupted as error:
            if not comparer.has_reached_end:
                raise Interrupted(
                    f"interrupted at step {comparer.step}, identical so far; nothing is kept",
                    error.exit_code - 128,
                ) from None
        assert comparer.folder is not None
        places = differences(record, comparer.folder, end)
        count = compared(record, comparer.folder)
        if comparer.difference is None:
            more, count["tensors"] = end_differences(record, comparer.folder, ended=upto is None)
            places += more
        elif comparer.difference not in places:  # a row that the record does not have
            places = sorted([comparer.difference, *places], key=earliest)
    return Comparison(
        places,
        {name: number for name, number in count.items() if number},
        upto,
        changes,
        problems(record),
        other_code(record.read_meta()),
    )


def last_step(record: RunFolder) -> int:
    """Return the step of the last recorded row.  Raises NothingMatchedError if there is no row."""
    last = read_table(record.steps_path).last
    if last is None and read_table(record.evals_path).last is None:
        raise NothingMatchedError(f"{record.path} has no row yet to compare with")
    return last or 0


def other_code(meta: Mapping[str, Any]) -> str:
    """Return 'commit a, now b' unless both commits are equal and clean, then ''."""
    known, now = meta.get("git") or {}, git_state()
    if known == now and not now.get("dirty"):
        return ""
    names = [
        f"{str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}"
        if git
        else "of no commit"
        for git in (known, now)
    ]
    return f"{names[0]}, now {names[1]}"


class RowDifferenceError(DifferenceError):
    """A row differs from the recorded one; it ends the training."""

    def __init__(self, difference: Difference, step: int) -> None:
        super().__init__(difference.place)
        self.step = step


class Comparer(Observers):
    """Compares every row with the recorded one, and passes every event on."""

    def __init__(self, record: RunFolder, inner: Observer, upto: int | None, stop: Stop) -> None:
        super().__init__(inner)
        self.upto, self.stop = upto, stop
        self.steps, self.evals = read_table(record.steps_path), read_table(record.evals_path)
        self.folder: RunFolder | None = None
        self.difference: Difference | None = None
        self.step = 0
        self.has_reached_end = False
        self._completed = 0

    def stop_signal(self) -> int | None:
        """Return the user's signal to stop, SIGTERM after the last recorded step, or None.

        The loop calls this once after every step.
        """
        self._completed += 1
        if (signal_number := self.stop()) is not None:
            return signal_number
        self.has_reached_end = self.upto is not None and self._completed >= self.upto
        return int(signal.SIGTERM) if self.has_reached_end else None

    def compare(self, file: str, table: Table, step: int, row: Row) -> None:
        """Raise RowDifferenceError at the first difference.

        Rows that only the record has show in the final comparison.
        """
        if step in table.rows:
            texts = {name: number_text(value) for name, value in row.items()}
            cells = row_difference(table.rows[step], texts)
        else:
            cells = None if self.upto is not None else ("the row", "not there", "there")
        if cells:
            self.difference = Difference(step, file, *cells)
            raise RowDifferenceError(self.difference, step)

    def started(self, run: Started) -> None:
        self.folder = run.folder
        super().started(run)

    def stepped(self, step: int, row: Row) -> None:
        self.step = step
        super().stepped(step, row)
        self.compare("steps.csv", self.steps, step, row)

    def evaluated(self, step: int, row: Row) -> None:
        super().evaluated(step, row)
        self.compare("evals.csv", self.evals, step, row)

    def finished(self, state: str, step: int) -> None:
        if self.has_reached_end:
            self.notify(f"the record goes to step {step}")
        else:
            super().finished(state, step)


def end_differences(old: RunFolder, new: RunFolder, ended: bool) -> tuple[list[Difference], int]:
    """Return the differences between the ends of two runs, and the number of compared tensors.

    Compares the states if the recorded run has ended, and the newest checkpoint of the same step.
    """
    places: list[Difference] = []
    was, now = old.read_status(), new.read_status()
    at = int(now["step"])
    if ended and was.get("state") != now["state"]:
        places.append(Difference(at, "status.json", "state", str(was.get("state")), now["state"]))
    step = max({*old.checkpoints()} & {*new.checkpoints()}, default=None)
    if step is None:
        if ended and now["state"] == "done" and not is_published(old.path):
            places.append(Difference(at, f"checkpoint/{at}", "the folder", "not there", "there"))
        return places, 0
    file = f"checkpoint/{step}"
    try:
        problem = damage(old.checkpoint_path(step))
        one = {} if problem else ckpt.load(old.checkpoint_path(step)).parts
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        problem, one = str(error), {}
    if problem:
        return [*places, Difference(step, file, "the folder", problem, "whole")], 0
    two = ckpt.load(new.checkpoint_path(step)).parts
    names = [
        (part, key)
        for part in sorted(one.keys() & two.keys(), reverse=True)  # the weights first
        for key in sorted({*one[part], *two[part]})
    ]
    for part, key in names:
        if values := tensor_difference(one[part].get(key), two[part].get(key)):
            where_different = Difference(step, f"{file}/{part}.safetensors", key, *values)
            return [*places, where_different], len(names)
    return places, len(names)


def tensor_difference(old: Tensor | None, new: Tensor | None) -> tuple[str, str] | None:
    """Return both values of the first element whose bits differ, or None."""
    if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
        return ckpt.shape_of(old), ckpt.shape_of(new)
    one, two = ckpt.bits(old), ckpt.bits(new)
    if torch.equal(one, two):
        return None
    index = int((one != two).nonzero()[0]) // old.element_size()
    at = [int(i) for i in torch.unravel_index(torch.tensor(index), old.shape)]
    values = (t.flatten()[index].item() for t in (old, new))
    first, second = (f"{value!r} at {at}" for value in values)
    return first, second
