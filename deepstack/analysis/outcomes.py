"""Judges runs as trained, stalled, above or diverged, and places them in maps.

Files hold these four values; readers see the words of OUTCOME_WORDS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepstack.analysis.settings import (
    DATA,
    DEPTH,
    LR,
    SCHEME,
    TASK,
    depth_of,
    determines,
    label_of,
    one_run_per_seed,
    order_of,
    setting_value,
    varying_settings,
)
from deepstack.analysis.statistics import last_row
from deepstack.errors import NothingMatchedError
from deepstack.records import Run

if TYPE_CHECKING:
    import pandas as pd

# The values in files, and the words that charts and printed tables show for them.
OUTCOME_WORDS = {
    "trained": "learnt", "stalled": "at chance", "above": "worse", "diverged": "diverged"
}  # fmt: skip
OUTCOMES = tuple(OUTCOME_WORDS)
# Nats between a loss and the unigram's on the same positions that count as a difference.
CLEAR = 0.1


OPTION = "model.scheme_options."


def in_words(outcomes: str) -> str:
    """Return outcomes as readers see them: '2 trained, 1 stalled' as '2 learnt, 1 at chance'."""
    for value, word in OUTCOME_WORDS.items():
        outcomes = outcomes.replace(value, word)
    return outcomes


def margin(run: Run) -> float | None:
    """Return L - L_0, the final validation loss minus the unigram's loss, in nats.

    None without an evaluation or anything to compare with.
    """
    loss, floor = loss_and_floor(run)
    return None if loss is None or floor is None else loss - floor


def loss_and_floor(run: Run) -> tuple[float | None, float | None]:
    """Return L and L_0, the final validation loss and the unigram's loss, in nats.

    L is taken where [MASK] is shown, L_0 is the unigram's loss on the same positions, of the same
    row of evals.csv.  A run that has no such column, or no [MASK], is compared with the entropies
    that it states.  A missing value is None.
    """
    if not len(run.evals):
        return None, None
    row = run.evals.iloc[[-1]]
    stated = run.columns.get("references", {})
    loss = last_row(row, "loss_masked")
    if loss is not None:
        floor = last_row(row, "unigram_loss") or stated.get("unigram_entropy")
    else:
        loss = last_row(row, "loss")
        floor = stated.get("context_free_entropy") or stated.get("uniform_entropy")
    return loss, None if floor is None else float(floor)


def outcome(run: Run) -> str | None:
    """Return one of OUTCOMES for a finished run with a known floor, or None."""
    if run.state == "diverged":
        return "diverged"
    difference = margin(run) if run.state == "done" else None
    if difference is None:
        return None
    if difference < -CLEAR:
        return "trained"
    return "stalled" if difference <= CLEAR else "above"


def runs_with_outcome(runs: Sequence[Run]) -> list[Run]:
    """Return the runs that have an outcome. Raises NothingMatchedError when there is none."""
    finished = [run for run in runs if outcome(run)]
    if not finished:
        raise NothingMatchedError(
            "no finished run has a validation loss that can be compared with a unigram's"
        )
    return finished


def map_table(runs: Sequence[Run], *, by_lr: bool = False) -> pd.DataFrame:
    """Return one row a seed of each cell of a map.

    Columns: run, depth, lr, panel, row, name, order, outcome, margin.

    A row of a map is a scheme with its options, if these vary.  Every other setting that varies
    makes panels, apart from depth, seed, `by_lr` the learning rate, and settings that scheme, depth
    and these determine, such as a learning rate chosen for each scheme.  Task and data always make
    panels, in the order of `order`.  name: row and panel in one label.  margin: NaN for a seed that
    diverged, whose last evaluation was before it did.
    """
    import pandas as pd

    axes = [DEPTH, SCHEME, *([LR] if by_lr else [])]
    varying = [key for key in varying_settings(runs) if key not in axes]
    options = [key for key in varying if key.startswith(OPTION)]
    panels: list[str] = []
    for key in varying:
        known = [*axes, *options, *panels]
        if key not in options and (key in (TASK, DATA) or not determines(known, key, runs)):
            panels.append(key)
    rows = []
    for run in runs:
        parts = [label_of(run, keys, runs) for keys in ([SCHEME, *options], panels)]
        rows.append(
            {
                "run": run,
                "depth": depth_of(run),
                "lr": float(run.get(LR, 0.0)),
                "row": parts[0],
            }
            | {"panel": parts[1], "name": ", ".join(filter(None, parts))}
            | {"order": tuple(order_of(setting_value(run, key)) for key in panels)}
            | {"outcome": outcome(run), "margin": margin(run) if run.state == "done" else None}
        )
    table = pd.DataFrame(rows).astype({"margin": float})
    cells = table.groupby(["name", "depth", *(["lr"] if by_lr else [])])
    chosen = {run for _, cell in cells for run in one_run_per_seed(cell["run"].tolist())}
    return table[table["run"].isin(chosen)]
