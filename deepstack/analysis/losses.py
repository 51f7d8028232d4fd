"""Validation losses of runs, and the reference losses that they are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from deepstack.analysis.statistics import last_row
from deepstack.records import Run

ON_MASK = " on [MASK]"


def has_mask_loss(runs: Sequence[Run]) -> bool:
    """Return whether all runs measured the validation loss where [MASK] is shown."""
    measured = [run for run in runs if len(run.evals)]
    return bool(measured) and all(
        last_row(run.evals, "loss_masked") is not None for run in measured
    )


def loss_column(runs: Sequence[Run]) -> str:
    """Return the column of the validation loss: on [MASK] only, if all runs have it."""
    return "loss_masked" if has_mask_loss(runs) else "loss"


def mask_note(runs: Sequence[Run]) -> str:
    """Return a note on the positions of the loss, if they are not all predicted positions."""
    evals = [run.evals for run in runs if len(run.evals)]
    parts = any(last_row(rows, "loss") != last_row(rows, "loss_masked") for rows in evals)
    return ON_MASK if has_mask_loss(runs) and parts else ""


def validation_levels(runs: Sequence[Run]) -> list[tuple[str, float]]:
    """Return the reference levels of the validation loss: on [MASK] alone nothing can be copied."""
    first = "unigram_entropy" if has_mask_loss(runs) else "context_free_entropy"
    levels = reference_levels(runs, [first, "uniform_entropy", "bayes_loss"])
    return levels or reference_levels(runs, ["unigram_entropy"])


def training_levels(runs: Sequence[Run]) -> list[tuple[str, float]]:
    """Return the reference levels of the training loss, which is over all predicted positions."""
    levels = reference_levels(runs, ["context_free_entropy", "uniform_entropy"])
    unigram = reference_levels(runs, ["unigram_entropy"])
    # If all predicted positions show [MASK], both levels are equal: draw one line with one name.
    same = {value for _, value in levels} == {value for _, value in unigram}
    return unigram if same or not levels else levels


def final_value(run: Run, column: str) -> float:
    """Return the last finite validation loss; NaN if there is none."""
    value = last_row(run.evals, column)
    return math.nan if value is None else value


def reference_levels(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[str, float]]:
    """Return name and value of the runs' levels: distinct values, at most three per name."""
    levels: list[tuple[str, float]] = []
    for name in names:
        distinct: list[float] = []
        for run in runs:
            value = _reference(run, name)
            if value is not None and not any(abs(v / value - 1) < 0.01 for v in distinct if value):
                distinct.append(value)
        levels += [(name, value) for value in distinct[:3]]
    return levels


def _reference(run: Run, name: str) -> float | None:
    if name == "bayes_loss" and "optimal_loss" in run.evals:
        return last_row(run.evals, "optimal_loss")
    value = run.columns.get("references", {}).get(name)
    return float(value) if isinstance(value, (int, float)) else None
