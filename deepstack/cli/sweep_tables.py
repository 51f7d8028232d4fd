"""Builds the tables of a sweep: its plan before the runs, and its results."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from deepstack.cli.tables import emit
from deepstack.config import Study, values
from deepstack.records import Run, run_rows
from deepstack.records.cells import scalar, text
from deepstack.sweeps import Cell, Progress, is_wanted, seconds_per_run


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
    for cell, time in zip(cells, seconds, strict=True):
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
                "minutes": minutes(time),
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
    emit(rows[:-1] if as_json else rows, as_json, first=first)


def as_power(flops: int) -> float:
    """Return a large number with four digits, which a table shows as 1.234e+12."""
    return float(f"{flops:.4g}")


def minutes(seconds: float | None) -> float | None:
    """Convert seconds to minutes, rounded to a tenth."""
    return None if seconds is None else round(seconds / 60, 1)


def result_rows(progress: Sequence[Progress], nested: bool) -> list[dict[str, Any]]:
    """Return last validation loss and ‖ΔF‖ as a table of scheme by depth; for JSON one row per run.

    Each scheme and value of the other swept keys has a row. A cell lists the seeds.
    """
    runs = [Run(e.cell.folder.path) for e in progress if e.cell.folder.exists()]
    if nested:
        return run_rows(runs) if runs else []
    head, others = "validation loss (‖ΔF‖)", other_keys(progress)
    depths = [str(n) for n in sorted({entry.cell.config.model.depth for entry in progress})]
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for entry in sorted(progress, key=lambda e: e.cell.config.seed):
        model = entry.cell.config.model
        first = {head: model.scheme}
        first |= {key: text(scalar(entry.cell.values.get(key))) for key in others}
        row = rows.setdefault(tuple(first.values()), first | dict.fromkeys(depths))
        row[str(model.depth)] = [*(row[str(model.depth)] or []), outcome(entry)]
    schemes = [row[head] for row in rows.values()]
    return sorted(rows.values(), key=lambda row: schemes.index(row[head]))


def other_keys(progress: Sequence[Progress]) -> list[str]:
    """Return the swept keys that scheme, depth and seed do not determine."""
    known: dict[tuple[str, int, int], dict[str, Any]] = {}
    keys: list[str] = []
    for entry in progress:
        config, values = entry.cell.config, entry.cell.values
        first = known.setdefault((config.model.scheme, config.model.depth, config.seed), values)
        keys += [key for key in values if values[key] != first.get(key) and key not in keys]
    return keys


def outcome(entry: Progress) -> str:
    """Return loss and ‖ΔF‖ as '2.91 (3.4)', or the state of a run that is not done."""
    run = Run(entry.cell.folder.path)
    if entry.state == "damaged" or (entry.state == "done" and run.damage()):
        return "damaged"
    if entry.state != "done":
        return f"{entry.state} at {entry.step}"
    if not len(run.evals):
        return "-"
    losses = run.evals.reindex(columns=["loss_masked", "loss"]).iloc[-1].dropna()
    return f"{losses.iloc[0]:.3f} ({float(run.folder.last_row()['model_update']):.3g})"
