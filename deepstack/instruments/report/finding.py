"""The finding of a study: best setting of each depth, exponents of ‖ΔF‖ in depth, divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepstack.base.text import counted, value_text
from deepstack.config import reading_text
from deepstack.runs.choice import Choice
from deepstack.runs.fit import Fit
from deepstack.runs.intervals import NO_INTERVAL
from deepstack.runs.learning import learning_of, rate_sentence
from deepstack.runs.outcomes import result_of
from deepstack.runs.runs import Runs
from deepstack.runs.settings import LR, SEED, TASK, depth_of, scheme_label
from deepstack.runs.statistics import (
    Mean,
    final_value,
    finite_or_none,
    has_diverged,
    loss_column,
    mean_of,
)

if TYPE_CHECKING:
    import pandas as pd

MOST_NAMES = 4  # settings that a sentence names; the lists below it have all


@dataclass(frozen=True)
class Candidate:
    """The finished seeds of one setting at one depth.

    losses: seed -> final validation loss in nats.
    floor: mean loss of a predictor without context.
    learns: whether some seed learns from context, or nothing is known of it.
    """

    scheme: str
    label: str
    losses: dict[int, float]
    floor: float
    learns: bool

    @property
    def mean(self) -> float:
        return mean_of(list(self.losses.values())).value


def finding_of(runs: Runs, best: Sequence[str], updates: pd.DataFrame | None) -> dict[str, Any]:
    """Return the finding of a study: sentences, a row for each depth, and lists.

    best: the settings of these runs that are chosen, full; the learning rate is chosen anyway where
        a setting and depth has several.
    updates: the table of the chart update_vs_depth, or None if it is not drawn.
    """
    known = runs.keep(lambda run: result_of(run).outcome)
    learning = learning_of(known.results.values())
    if any(one.rate is not None for one in learning):
        best = list(dict.fromkeys([*best, LR]))
    depths = best_of_depths(runs, best)
    exponents = exponents_of(updates)
    diverged, failed = failed_runs(runs)
    sentences = list(filter(None, [rate_sentence(learning, MOST_NAMES)]))
    sentences += [leader_sentence(depths[-1])] if depths else []
    sentences += exponent_sentences(exponents)
    if failed:
        sentences.append(f"No better than a predictor without context: {listed(failed)}.")
    if count := sum(map(has_diverged, runs)):
        every = counted("{} runs", len(runs))
        sentences.append(f"{count} of {every} diverged: {listed(diverged)}.")
    else:
        sentences.append("No run diverged." if len(runs) > 1 else "The run did not diverge.")
    sentences += reading_sentence(runs)
    return {
        "sentences": sentences,
        "depths": depths,
        "several_depths": len({depth_of(run) for run in runs}) > 1,
        "exponents": exponents,
        "diverged": diverged,
    }


def reading_sentence(runs: Runs) -> list[str]:
    """Return a sentence on how often the runs read their text; none if no run has such a record."""
    times = [run.meta.get("data", {}).get("times_read") for run in runs]
    known = [number for number in times if number]
    text = reading_text(known) if known else ""
    return [f"{text[0].upper()}{text[1:]}."] if text else []


def best_of_depths(runs: Runs, best: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the setting with the lowest mean validation loss of each depth, and its margin.

    Only settings whose seeds are all done count.  The margin compares with the best setting of
    another scheme, or of the same one if no other is there.  It has the mean and the 95 % interval
    (Student's t) of the differences, seed by seed.  Losses of several tasks are not compared.
    """
    if len({run.get(TASK) for run in runs}) > 1:
        return []
    column = loss_column(runs)
    of_depths: dict[int, list[Candidate]] = {}
    for label, choice in runs.choices(best):
        if candidate := candidate_of(label, choice, column):
            of_depths.setdefault(depth_of(choice.runs[0]), []).append(candidate)
    rows = []
    for depth, candidates in sorted(of_depths.items()):
        if len(candidates) < 2:
            continue
        leader, *others = sorted(candidates, key=lambda one: one.mean)
        second = next((one for one in others if one.scheme != leader.scheme), others[0])
        gap = margin_of(leader, second)
        rows.append(
            {
                "depth": depth,
                "leader": leader.label,
                "loss": leader.mean,
                "learns": any(one.learns for one in candidates),
                "below": finite_or_none(leader.floor - leader.mean),
                "second": second.label,
                "margin": gap.value,
                "low": finite_or_none(gap.low),
                "high": finite_or_none(gap.high),
                "pairs": gap.n,
                "settings": len(candidates),
                "verdict": verdict_of(gap),
            }
        )
    return rows


def candidate_of(label: str, choice: Choice, column: str) -> Candidate | None:
    """Return a setting at one depth as a candidate; None if some seed is not done."""
    losses = {int(run.get(SEED, 0)): final_value(run, column) for run in choice.runs}
    is_done = choice.complete and all(run.state == "done" for run in choice.runs)
    if not is_done or not all(map(math.isfinite, losses.values())):
        return None
    ends = [result_of(run) for run in choice.runs]
    floor = mean_of([end.floor for end in ends]).value
    learns = any(end.outcome in (None, "trained") for end in ends)
    for key, value in choice.values.items():
        label += f", {key.rpartition('.')[2]} {value_text(value)}"
    return Candidate(scheme_label(choice.runs[0]), label, losses, floor, learns)


def margin_of(leader: Candidate, second: Candidate) -> Mean:
    """Return how far `leader` is below `second`: over shared seeds, or of the means without any."""
    shared = sorted(set(leader.losses) & set(second.losses))
    gap = mean_of([second.losses[seed] - leader.losses[seed] for seed in shared])
    return gap if shared else gap._replace(value=second.mean - leader.mean)


def verdict_of(gap: Mean) -> str:
    """Return the verdict on the interval of a margin, in words."""
    if not math.isfinite(gap.low):
        return NO_INTERVAL if gap.n else "no interval: no shared seed"
    return "clear" if gap.low > 0 else "not clear: the interval includes 0"


def leader_sentence(row: dict[str, Any]) -> str:
    """Return the sentence on the best setting of the greatest depth."""
    if not row["learns"]:
        return (
            f"At N = {row['depth']}, no run learns from context; the lowest loss is "
            f"{row['loss']:.3f} ({row['leader']})."
        )
    interval, unclear = row["verdict"], row["low"] is not None and row["low"] <= 0
    if row["low"] is not None:
        interval = f"95 % interval {row['low']:.3f} to {row['high']:.3f}, {row['pairs']} seeds"
        interval = interval.replace("-", "−")
    return (
        f"At N = {row['depth']}, {row['leader']} has the lowest validation loss, "
        f"{row['loss']:.3f} nats: {row['margin']:.3f} below {row['second']} ({interval})"
        + (". The interval includes 0, so no difference is shown." if unclear else ".")
    )


def exponents_of(updates: pd.DataFrame | None) -> list[dict[str, Any]]:
    """Return the fitted exponents of ‖ΔF‖ in depth: a row a setting, its text for each step."""
    if updates is None or "exponent" not in updates:
        return []
    steps: dict[str, dict[str, str]] = {}
    for row in updates[updates["kind"] == "fit"].to_dict("records"):
        error, seeds = row.get("standard_error", math.nan), int(row["seeds"])
        fit = Fit(row["exponent"], error, 0.0, int(row["n"]), seeds)
        name = str(row["series"]).replace("\u00a0", " ")
        # A panel is named for its step, after the scheme or setting that it shows.
        step = str(row["panel"]).rpartition(": ")[2]
        steps.setdefault(name, {})[step] = str(fit)
    return [{"name": name, "steps": texts} for name, texts in steps.items()]


def exponent_sentences(exponents: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence for each step on the growth of ‖ΔF‖ with depth."""
    sentences = []
    for step in dict.fromkeys(step for entry in exponents for step in entry["steps"]):
        known = [entry for entry in exponents if step in entry["steps"]]
        named = [f"{entry['steps'][step]} ({entry['name']})" for entry in known[:MOST_NAMES]]
        more = f", and {len(known) - MOST_NAMES} more" if len(known) > MOST_NAMES else ""
        sentences.append(
            f"After {step}, the model update is about a power of the depth N, with exponent "
            f"{', '.join(named)}{more}."
        )
    return sentences


def failed_runs(runs: Runs) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the settings and depths with diverged runs and those with runs that learnt no context.

    Each has the number of such runs; a run that learnt no context is finished.
    """
    diverged, without_context = [], []
    for s in runs.series():
        for depth in s.depths:
            name = f"{s.label}, N = {depth}".replace("\u00a0", " ")
            there = s.everything_at(depth)
            ends = [int(run.status.get("step") or 0) for run in there if has_diverged(run)]
            if ends:
                at = f"step {min(ends)}" + (f" to {max(ends)}" if len(set(ends)) > 1 else "")
                diverged.append((name, f"{len(ends)} of {len(there)}, at {at}"))
            outcomes = [result_of(run).outcome for run in there]
            if count := sum(outcome in ("stalled", "above") for outcome in outcomes):
                without_context.append((name, f"{count} of {len(there)}"))
    return diverged, without_context


def listed(entries: Sequence[tuple[str, str]]) -> str:
    """Return the first of these names and counts in one line, and the number of others."""
    words = "; ".join(f"{name} ({count})" for name, count in entries[:MOST_NAMES])
    more = len(entries) - MOST_NAMES
    return words + (f"; and {counted('{} other settings', more)}" if more > 0 else "")
