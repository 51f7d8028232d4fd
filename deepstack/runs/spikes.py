"""Spikes of runs, steps at which the loss or the gradient norm jumped: their log, and in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from deepstack.base.text import counted
from deepstack.records import Run
from deepstack.records.run import read_rows
from deepstack.runs.settings import depth_of, scheme_label

SPIKES_LOG = "spikes"
WINDOW = 20  # steps before a step, with which the rule compares it
LOSS_DEVIATIONS = 8.0
GRAD_NORM_FACTOR = 4.0
MOVED = 3.0  # times its median: an update from which on a layer counts as moved
MOST_NAMED = 3  # runs with spikes that a finding names

SPIKES_COLUMNS = {
    "step": ("t", "steps", "The step of the spike; layers/ has a record of it."),
    "loss_deviations": (
        "",
        "",
        f"Robust deviations of the loss above its median over the {WINDOW} steps before; a spike "
        f"above {LOSS_DEVIATIONS:g}.",
    ),
    "grad_norm_factor": (
        "",
        "",
        f"The gradient norm over its median of the {WINDOW} steps before; a spike above "
        f"{GRAD_NORM_FACTOR:g}.",
    ),
    "moved_layer": ("l", "", "The layer that moved first, from 1 on; empty if none did."),
    "moved_step": ("t", "steps", "The step at which it moved: of the spike, or up to 5 before."),
    "moved_factor": (
        "",
        "",
        f"Norm of its parameters' change over the median of the {WINDOW} steps before.",
    ),
    "moved_factor_median": ("", "", "The median of this factor over all layers at that step."),
}
"""Column -> symbol, unit and one sentence; a row a spike."""


def spikes_of(run: Run) -> list[dict[str, float]]:
    """Return the rows of a run's spikes.csv; none for a run without."""
    return read_rows(run.folder.csv_path(SPIKES_LOG), ("step",))


def spike_clause(row: dict[str, float]) -> str:
    """Return the clause on one spike, with the layer that moved first."""
    step, loss, norm = int(row["step"]), row["loss_deviations"], row["grad_norm_factor"]
    of_loss = f"{factor_text(loss)} robust deviations above its median"
    of_norm = f"{factor_text(norm)} times its median"
    if loss > LOSS_DEVIATIONS and norm > GRAD_NORM_FACTOR:
        text = f"loss and gradient norm jump at step {step} ({of_loss}; {of_norm})"
    elif loss > LOSS_DEVIATIONS:
        text = f"the loss jumps at step {step} ({of_loss})"
    else:
        text = f"the gradient norm jumps at step {step} ({of_norm})"
    return f"{text}; {moved_clause(row)}"


def factor_text(factor: float) -> str:
    """Return a factor with one decimal, or without from 100 on: '7.3', '46,523'."""
    return f"{factor:.1f}" if abs(factor) < 100 else f"{factor:,.0f}"


def moved_clause(row: dict[str, float]) -> str:
    """Return the clause on the layer that moved first at a spike."""
    layer, factor, median = (row[f"moved_{name}"] for name in ("layer", "factor", "factor_median"))
    if math.isnan(layer):
        return f"no layer's update is above {MOVED:g} times its median"
    at, much = f"at step {int(row['moved_step'])}", f"{factor_text(factor)} times"
    if median > max(MOVED, factor / 2):
        return f"all layers moved {at}, layer {int(layer)} most: its update is {much} its median"
    others = f"the median layer's {factor_text(median)} times"
    return f"layer {int(layer)} moved first, {at}: its update is {much} its median, {others}"


def spike_sentence(run: Run) -> str | None:
    """Return the sentence on the first spike of a run and the number of others; None without."""
    rows = spikes_of(run)
    if not rows:
        return None
    text = spike_clause(rows[0])
    more = f"; {counted('{} more spikes', len(rows) - 1)} in spikes.csv" if len(rows) > 1 else ""
    return f"{text[0].upper()}{text[1:]}{more}."


def spike_sentences(runs: Iterable[Run]) -> list[str]:
    """Return the sentences of a study on the runs with spikes, of which it names the first."""
    spiked = [(run, rows) for run in runs if (rows := spikes_of(run))]
    if not spiked:
        return []
    names = "; ".join(map(named_clause, *zip(*spiked[:MOST_NAMED], strict=True)))
    more = f"; and {len(spiked) - MOST_NAMED} more" if len(spiked) > MOST_NAMED else ""
    number = "1 run has" if len(spiked) == 1 else f"{len(spiked)} runs have"
    return [f"{number} spikes: {names}{more}."]


def named_clause(run: Run, rows: Sequence[dict[str, float]]) -> str:
    """Return the clause on the first spike of a run, which it names."""
    name = f"{scheme_label(run)}, N = {depth_of(run)}, seed {run.get('seed')}"
    return f"{name}: {spike_clause(rows[0])}"
