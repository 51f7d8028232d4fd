"""The differences of two runs: settings, environment, results, and the first row of each log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepstack.base import counted
from deepstack.records import Run, read_rows
from deepstack.runs import OUTCOME_WORDS, result_of

FIRST, SECOND = "first", "second"
TIMED = "timing"  # its rows differ between any two executions

Rows = list[dict[str, Any]]
"""kind, name, first, second."""


def differences(first: Run, second: Run) -> tuple[Rows, list[str]]:
    """Return a row for each difference of two runs, and sentences on the parts that are equal.

    first, second: values of both runs; None where one has none.  A log has one row: the first step
    and column at which the runs differ, or the steps at which they end.

    Raises ResourceError for a run that cannot be read.
    """
    parts = {
        "setting": (first.flat_config, second.flat_config),
        "environment": (environment_of(first), environment_of(second)),
        "result": (result_values(first), result_values(second)),
    }
    rows, equal = [], []
    for kind, (one, other) in parts.items():
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        rows += [row_of(kind, name, one.get(name), other.get(name)) for name in names]
        if not names:
            equal.append(f"equal: {kind}s" if kind != "environment" else "equal: environment")
    for name in logs_of(first, second):
        row, count = log_difference(first, second, name)
        if row is None:
            equal.append(f"equal: {name}.csv, {counted('{} rows', count)}")
        else:
            rows.append(row)
    return rows, equal


def row_of(kind: str, name: str, one: Any, other: Any) -> dict[str, Any]:
    """Return a row of the table."""
    return {"kind": kind, "name": name, FIRST: one, SECOND: other}


def environment_of(run: Run) -> dict[str, Any]:
    """Return environment and commit of a run."""
    meta = run.meta
    environment, git = (dict(meta.get(name) or {}) for name in ("environment", "git"))
    return environment | {"commit": git.get("commit")}


def result_values(run: Run) -> dict[str, Any]:
    """Return the state of a run, its last step, validation loss and outcome."""
    end = result_of(run)
    return {
        "state": run.state,
        "step": run.status.get("step"),
        "val_loss": end.loss,
        "outcome": None if end.outcome is None else OUTCOME_WORDS[end.outcome],
    }


def logs_of(first: Run, second: Run) -> Iterator[str]:
    """Yield the names of the logs that both runs have, whose rows can be equal."""
    there = second.log_names()
    for name in first.log_names():
        if name in there and name != TIMED:
            yield name


def log_difference(first: Run, second: Run, name: str) -> tuple[dict[str, Any] | None, int]:
    """Return the row on the first difference of a log, and the number of equal rows before it."""
    one, other = (read_rows(run.folder.csv_path(name), ("step",)) for run in (first, second))
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if (column := first_column(a, b)) is not None:
            at = f"{column} at step {int(a['step'])}" if column != "step" else "step"
            return row_of(f"{name}.csv", at, a.get(column), b.get(column)), number
    shorter = min(len(one), len(other))
    if len(one) != len(other):
        ends = [int(rows[-1]["step"]) if rows else None for rows in (one, other)]
        return row_of(f"{name}.csv", "last step", *ends), shorter
    return None, shorter


def first_column(one: Mapping[str, float], other: Mapping[str, float]) -> str | None:
    """Return the first column with another value; NaN equals NaN."""
    for column in {**one, **other}:
        a, b = one.get(column), other.get(column)
        if a != b and not (a is not None and b is not None and a != a and b != b):
            return column
    return None
