"""Prints the plan of `deepstack sweep`, its progress, and its results as a table."""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from deepstack.base.errors import ResourceError
from deepstack.base.text import clock_text, counted, distinct_texts, scalar
from deepstack.cli.output import emit, is_interactive, log, terminal_console
from deepstack.cli.run_table import (
    RunRow,
    changes_of_state,
    counts,
    live_table,
    read_row,
)
from deepstack.cli.views import sweep_view
from deepstack.config import Study, values
from deepstack.config.key import LR, Key
from deepstack.records import Run, run_rows
from deepstack.runs.outcomes import Result, result_of
from deepstack.runs.result_table import result_table
from deepstack.schemes import SCHEMES
from deepstack.sweeps import Cell, CellProgress, is_wanted, seconds_per_run


def plan_rows(
    study: Study, cells: Sequence[Cell], workers: int, retry: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the plan: one row per run with times from a short trial, and a last row of totals.

    Every swept key and every key of an override has a column. Values of overrides end in '*'.
    """
    todo = [cell for cell in cells if is_wanted(cell, retry)]
    times = iter(seconds_per_run(todo))
    seconds = [next(times) if is_wanted(cell, retry) else 0.0 for cell in cells]
    overridden = list(dict.fromkeys(key for cell in cells for key in cell.overridden))
    usual = values(study.base)
    rows: list[dict[str, Any]] = []
    for cell, estimate in zip(cells, seconds, strict=True):
        marked = {key: f"{value}*" for key, value in cell.overridden.items()}
        rows.append(
            {"run": cell.folder.name}
            | {key: scalar(cell.values[key]) for key in study.keys}
            | {key: marked.get(key, scalar(usual.get(key))) for key in overridden}
            | {
                "state": cell.state,
                "steps": cell.config.train.steps,
                "flops": as_power(cell.flops),
                "parameters": cell.parameters,
                "memory_mb": round(cell.memory / 1e6),
                "minutes": minutes(estimate),
            }
        )
    known = [one for one in seconds if one is not None]
    longest = max(sum(known) / workers, max(known, default=0.0))
    left_out = study.total - study.size
    totals = {
        "run": f"{len(todo):,} to run, {workers} at a time"
        + (f", {left_out:,} left out" if left_out > 0 else ""),
        "state": "",
        "steps": sum(cell.config.train.steps for cell in todo),
        "flops": as_power(sum(cell.flops for cell in todo)),
        "memory_mb": round(sum(sorted(cell.memory for cell in todo)[-workers:]) / 1e6),
        "minutes": minutes(longest if len(known) == len(cells) else None),
    }
    return [*rows, dict.fromkeys(rows[0]) | totals]


def emit_plan(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print the plan; as JSON, without the row of totals."""
    # a run's name has scheme, depth and seed
    first = [key for key in rows[0] if key not in ("model.scheme", "model.depth", "seed")]
    first = ["run", "state", "minutes", *first]
    emit(rows[:-1] if as_json else rows, as_json, answer=["state", "minutes"], first=first)


def as_power(flops: int) -> float:
    """Return a large number with four digits, which a table shows as 1.234e+12."""
    return float(f"{flops:.4g}")


def minutes(seconds: float | None) -> float | None:
    """Convert seconds to minutes, rounded to a tenth."""
    return None if seconds is None else round(seconds / 60, 1)


@contextmanager
def watch(quiet: bool, cells: Sequence[Cell]) -> Iterator[Callable[[Sequence[CellProgress]], None]]:
    """Yield the display: a bar and a table on a terminal, else a line per change of state.

    quiet: nothing is shown.
    """
    rows: dict[str, RunRow] = {}
    if quiet:
        yield lambda progress: None
    elif is_interactive(sys.stderr):
        console = terminal_console()
        view = sweep_view(console)
        total = sum(cell.flops for cell in cells)
        with view.live:

            def show(progress: Sequence[CellProgress]) -> None:
                known = read_rows(progress, rows)
                left = sum(map(flops_left, progress, known))
                view.show(round(total - left), total, counts(entry.state for entry in progress))
                view.show_table(live_table(known, console.width, console.height - 1))

            yield show
    else:
        log(counted("{} runs", len(cells)))
        began, seen = time.monotonic(), {cell.folder.name: cell.state for cell in cells}

        def show_lines(progress: Sequence[CellProgress]) -> None:
            started = [row for row in read_rows(progress, rows) if row.state != "waiting"]
            for line in changes_of_state(started, seen):
                log(line)

        yield show_lines
        if rows:
            states = counts(row.state for row in rows.values())
            log(f"{states}; {clock_text(time.monotonic() - began)} in all")


def read_rows(progress: Sequence[CellProgress], known: dict[str, RunRow]) -> list[RunRow]:
    """Return the rows of a sweep's runs; those that do not run are read once in each state.

    known: the rows by the names of the folders, which it updates.
    """
    for entry in progress:
        folder, steps = entry.cell.folder, entry.cell.config.train.steps
        row = known.get(folder.name)
        if row is None or row.state != entry.state or entry.state == "running":
            try:
                row = read_row(folder, folder.name, entry.state, steps)
            except (ResourceError, ValueError):
                row = RunRow(folder.name, entry.state, 0, steps)
            known[folder.name] = row
    return list(known.values())


def flops_left(entry: CellProgress, row: RunRow) -> float:
    """Return the FLOPs that the sweep still has to do on a run."""
    if row.state not in ("waiting", "running"):
        return 0.0
    return entry.cell.flops * (1 - row.step / max(entry.cell.config.train.steps, 1))


def result_rows(progress: Sequence[CellProgress], nested: bool) -> list[dict[str, Any]]:
    """Return the results as a table (`deepstack.runs.result_table`); for JSON one row per run."""
    if nested:
        runs = [Run(e.cell.folder.path) for e in progress if e.cell.folder.exists()]
        return run_rows(runs) if runs else []
    results, updates = [], {}
    for entry, setting in zip(progress, setting_labels(progress), strict=True):
        one, update = result_of_entry(entry, setting)
        results.append(one)
        if update is not None:
            updates[one] = update
    return result_table(results, updates)


def setting_labels(progress: Sequence[CellProgress]) -> list[str]:
    """Return the label of each cell's settings, apart from depth, seed and learning rate."""
    others = [key for key in other_keys(progress) if key != LR]
    texts = {key: distinct_texts([e.cell.values.get(key) for e in progress]) for key in others}
    labels = []
    for entry in progress:
        values = {key: scalar(entry.cell.values.get(key)) for key in others}
        words = [f"{Key(key).short} {texts[key][value]}" for key, value in values.items()]
        labels.append(", ".join([SCHEMES[entry.cell.config.model.scheme].label, *words]))
    return labels


def other_keys(progress: Sequence[CellProgress]) -> list[str]:
    """Return the swept keys that scheme, depth and seed do not determine."""
    known: dict[tuple[str, int, int], dict[str, Any]] = {}
    keys: list[str] = []
    for entry in progress:
        config, values = entry.cell.config, entry.cell.values
        first = known.setdefault((config.model.scheme, config.model.depth, config.seed), values)
        keys += [key for key in values if values[key] != first.get(key) and key not in keys]
    return keys


def result_of_entry(entry: CellProgress, setting: str) -> tuple[Result, float | None]:
    """Return the result of a cell and its last ‖ΔF‖; a run that is not done has no loss."""
    config, run = entry.cell.config, Run(entry.cell.folder.path)
    is_damaged = entry.state == "damaged" or (entry.state == "done" and run.damage())
    state = "damaged" if is_damaged else entry.state
    if state == "done":
        update = float(run.folder.last_row()["model_update"]) if len(run.evals) else None
        return result_of(run, setting)._replace(rate=config.train.lr), update
    text = state if is_damaged else f"{state} at {entry.step}"
    lacking = (config.train.lr, config.seed, text, None, None)
    return Result(setting, setting, config.model.depth, *lacking), None
