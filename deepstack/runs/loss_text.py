"""The validation loss of an evaluation, and its reference: the loss without context.

It imports neither numpy nor pandas, so that displays and `deepstack ls` start fast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deepstack.base.text import number_text
from deepstack.records import Run


def loss_text(row: Mapping[str, float | None], stated: Mapping[str, Any]) -> str:
    """Return '3.067 ± 0.059 nats (unigram 3.263)': the loss that counts beside its reference.

    It is the loss where [MASK] is shown, if the row has one: outcomes and tables compare the same.

    row: of evals.csv.
    stated: losses in nats that the task states, by name.
    """
    column, reference = compared_losses(row, stated)
    error = row.get(f"{column}_se")
    text = f"{number_text(row.get(column))}{f' ± {error:.2g}' if error else ''} nats"
    levels = [] if reference is None else [f"{reference_name(stated)} {number_text(reference)}"]
    if (optimum := known(row.get("optimal_loss"))) is not None:
        levels.append(f"optimum {number_text(optimum)}")
    return f"{text} ({', '.join(levels)})" if levels else text


def compared_losses(
    row: Mapping[str, float | None], stated: Mapping[str, Any]
) -> tuple[str, float | None]:
    """Return the column of the loss that counts in a row, and the loss without context.

    row, stated: see `loss_text`.
    """
    masked = known(row.get("loss_masked"))
    column = "loss" if masked is None else "loss_masked"
    shows = shows_tokens(known(row.get("loss")), masked)
    return column, loss_without_context(column, known(row.get("unigram_loss")), shows, stated)


def loss_without_context(
    column: str, logged: float | None, shows: bool, stated: Mapping[str, Any]
) -> float | None:
    """Return the loss in nats of the best predictor without context, or None.

    column: of the loss that it is compared with.
    logged: the mean over the positions of `loss_masked`, if the run has recorded one.
    shows: whether some positions of `loss` show a token; `logged` does not hold for these.
    stated: losses in nats that the task states, by name.
    """
    if logged is not None and (column == "loss_masked" or not shows):
        return logged
    first = "unigram_entropy" if column == "loss_masked" else "context_free_entropy"
    values = (known(stated.get(name)) for name in (first, "uniform_entropy"))
    return next((value for value in values if value is not None), None)


def context_free_loss(run: Run, column: str) -> float | None:
    """Return the validation loss in nats of the best predictor without context: that at chance.

    column: of the loss that it is compared with.  It is `unigram_loss` of evals.csv, the mean over
        the positions of `loss_masked`.  A run without it, or one whose `loss` has positions that
        show a token, is compared with an entropy that its task states.  None if nothing is known.
    """
    rows, stated = run.evaluations, run.columns.get("references", {})
    shows = shows_tokens(latest(rows, "loss"), latest(rows, "loss_masked"))
    return loss_without_context(column, latest(rows, "unigram_loss"), shows, stated)


def latest(rows: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Return the last finite value of a column, or None."""
    values = (known(row.get(name)) for row in reversed(rows))
    return next((value for value in values if value is not None), None)


def shows_tokens(of_all: float | None, masked: float | None) -> bool:
    """Return whether some predicted positions show a token: their loss is not that on [MASK]."""
    return of_all is None or masked is None or not math.isclose(of_all, masked, rel_tol=1e-5)


def reference_name(stated: Mapping[str, Any]) -> str:
    """Return the name of the predictor without context: the unigram of a text, else chance."""
    return "unigram" if "unigram_entropy" in stated else "chance"


def known(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def in_nats(runs: Sequence[Run], text: str) -> str:
    """Return a text with the unit of the losses of runs, but not for another trainer's metric."""
    columns = [run.columns.get("columns", {}).get("loss", {}) for run in runs]
    units = {str(one.get("unit", "nats")) for one in columns}
    return f"{text} (nats)" if units <= {"nats"} else text
