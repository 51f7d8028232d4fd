"""The finding of a study: best setting of each depth, exponents of ‖ΔF‖ in depth, divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepstack.analysis.comparison import Choice, choices
from deepstack.analysis.fit import Fit, signed
from deepstack.analysis.outcomes import loss_and_floor
from deepstack.analysis.settings import (
    SEED,
    TASK,
    depth_of,
    scheme_label,
    varying_settings,
)
from deepstack.analysis.statistics import (
    Mean,
    final_value,
    has_diverged,
    loss_column,
    mean_of,
)
from deepstack.records import Run
from deepstack.records.cells import counted

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Candidate:
    """The finished seeds of one setting at one depth.

    losses: seed -> final validation loss in nats.  floor: mean loss of a predictor without context.
    """

    scheme: str
    label: str
    losses: dict[int, float]
    floor: float

    @property
    def mean(self) -> float:
        return mean_of(list(self.losses.values())).value


def sentences_of(
    runs: Sequence[Run], depths: Sequence[dict[str, Any]], updates: pd.DataFrame | None
) -> list[str]:
    """Return the finding of a study in sentences.

    depths: from `best_of_depths`.  updates: the table of the chart update_vs_depth, or None if it
    is not drawn.
    """
    sentences = [leader_sentence(depths[-1])] if depths else []
    if updates is not None:
        sentences += exponent_sentences(updates)
    return [
        *sentences,
        f"{sum(map(has_diverged, runs))} of {counted('{} runs', len(runs))} diverged.",
    ]


def best_of_depths(runs: Sequence[Run], best: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the setting with the lowest mean validation loss of each depth, and its margin.

    Only settings whose seeds are all done count.  The margin is that over the best setting of
    another scheme, or of the same one if no other is there.  It has the mean and the 95 % interval
    (Student's t) of the differences, seed by seed.  Losses of several tasks are not compared.
    """
    if len({run.get(TASK) for run in runs}) > 1:
        return []
    keys = [key for key in best if key in varying_settings(runs)]
    column = loss_column(runs)
    of_depths: dict[int, list[Candidate]] = {}
    for label, choice in choices(runs, keys):
        if candidate := candidate_of(label, choice, column):
            of_depths.setdefault(depth_of(choice.runs[0]), []).append(candidate)
    rows = []
    for depth, candidates in sorted(of_depths.items()):
        if len(candidates) < 2:
            continue
        leader, *others = sorted(candidates, key=lambda one: one.mean)
        second = next((one for one in others if one.scheme != leader.scheme), others[0])
        margin = margin_of(leader, second)
        row: dict[str, Any] = {
            "depth": depth,
            "setting": leader.label,
            "val_loss": leader.mean,
            "below_unigram": leader.floor - leader.mean,
            "next": second.label,
            "margin": margin.value,
            "margin_low": margin.low,
            "margin_high": margin.high,
            "pairs": margin.n,
        }
        rows.append({key: None if value != value else value for key, value in row.items()})
    return rows


def candidate_of(label: str, choice: Choice, column: str) -> Candidate | None:
    """Return a setting at one depth as a candidate; None if some seed is not done."""
    if not choice.complete or any(run.state != "done" for run in choice.runs):
        return None
    losses = {int(run.get(SEED, 0)): final_value(run, column) for run in choice.runs}
    if not all(map(math.isfinite, losses.values())):
        return None
    floor = mean_of([loss_and_floor(run)[1] for run in choice.runs]).value
    chosen = "".join(f", {key.rpartition('.')[2]} {value}" for key, value in choice.values.items())
    return Candidate(scheme_label(choice.runs[0]), label + chosen, losses, floor)


def margin_of(leader: Candidate, second: Candidate) -> Mean:
    """Return how far `leader` is below `second`: over shared seeds, or of the means without any."""
    shared = sorted(set(leader.losses) & set(second.losses))
    if not shared:
        return mean_of([])._replace(value=second.mean - leader.mean)
    return mean_of([second.losses[seed] - leader.losses[seed] for seed in shared])


def leader_sentence(row: dict[str, Any]) -> str:
    """Return the sentence on the best setting of the greatest depth."""
    loss = f"{row['val_loss']:.3f} nats"
    if row["below_unigram"] is not None:
        loss += f", {signed(row['below_unigram'], 3)} below a predictor without context"
    margin = f"{signed(row['margin'], 3)} below {row['next']}"
    if row["margin_low"] is None:
        margin += " (no interval)"
    else:
        low, high = (signed(row[f"margin_{end}"], 3) for end in ("low", "high"))
        margin += f" (95 % interval {low} to {high}, {row['pairs']} seeds)"
        margin += ". The interval includes 0, so no difference is shown" * (row["margin_low"] <= 0)
    return (
        f"At N = {row['depth']}, {row['setting']} has the lowest validation loss, {loss}, and "
        f"{margin}."
    )


def exponent_sentences(updates: pd.DataFrame) -> list[str]:
    """Return a sentence for each step on the growth of ‖ΔF‖ with depth.

    updates: the table of the chart update_vs_depth.
    """
    fitted = updates[updates["kind"] == "fit"]
    fitted = fitted.reindex(columns=["panel", "series", "exponent", "standard_error", "n"])
    sentences = []
    for step, fits in fitted.groupby("panel", sort=False):
        named = [
            f"{Fit(row['exponent'], row['standard_error'], 0.0, int(row['n']))} ({row['series']})"
            for row in fits.to_dict("records")
        ]
        sentences.append(
            f"After {step}, the model update is about a power of the depth N, with exponent "
            f"{', '.join(named)}."
        )
    return sentences
