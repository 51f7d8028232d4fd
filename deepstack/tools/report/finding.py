"""The finding of a study: best setting of each depth, exponents of ‖ΔF‖ in depth, divergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepstack.base import counted
from deepstack.config import reading_text
from deepstack.runs import (
    LEAST_SEEDS,
    LR,
    NO_INTERVAL,
    Best,
    Fit,
    Mean,
    Runs,
    bests_of,
    depth_of,
    digits_of,
    finite_or_none,
    growth_sentence,
    growths_of,
    has_diverged,
    lead_sentence,
    margin_of,
    mean_of,
    rate_sentence,
    result_of,
    spike_sentences,
    steps_of,
    task_sentence,
)

if TYPE_CHECKING:
    import pandas as pd

MOST_NAMES = 4  # settings that a sentence names; the lists below it have all


def finding_of(runs: Runs, best: Sequence[str], updates: pd.DataFrame | None) -> dict[str, Any]:
    """Return the finding of a study: sentences, a row for each depth, and lists.

    best: the settings of these runs that are chosen, full; the learning rate is chosen anyway where
        a setting and depth has several.
    updates: the table of the chart update_vs_depth, or None if it is not drawn.
    """
    known = runs.keep(lambda run: result_of(run).outcome)
    learning = bests_of(known.results.values())
    if any(one.is_chosen for one in learning):
        best = list(dict.fromkeys([*best, LR]))
    depths = best_of_depths(runs, best)
    exponents = exponents_of(updates)
    diverged, failed = failed_runs(runs)
    sentences = list(filter(None, [rate_sentence(learning, MOST_NAMES)]))
    lead = lead_sentence(runs.bests(best))
    sentences += [lead] if lead else task_sentence(one.task for one in known.results.values())
    sentences += growth_sentences(runs, updates)
    if failed:
        sentences.append(f"No better than a predictor without context: {listed(failed)}.")
    if count := sum(map(has_diverged, runs)):
        every = counted("{} runs", len(runs))
        sentences.append(f"{count} of {every} diverged: {listed(diverged)}.")
    else:
        sentences.append("No run diverged." if len(runs) > 1 else "The run did not diverge.")
    sentences += [*spike_sentences(runs), *reading_sentence(runs)]
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
    """Return the setting with the least mean validation loss of each depth, and its margin.

    Values of the settings `best` are chosen by the rule of `deepstack.runs.best`, the margin is
    that of `deepstack.runs.margin`.  Losses of several tasks are not compared.
    """
    of_depths: dict[int, list[Best]] = {}
    for one in runs.bests(best):
        of_depths.setdefault(one.depth, []).append(one)
    rows = []
    for depth, settings in sorted(of_depths.items()):
        margin = margin_of(settings)
        if margin is None:
            continue
        ends, gap = margin.leader.by_seed.values(), margin.gap
        loss = mean_of([one.loss for one in ends]).value
        floor = mean_of([one.floor for one in ends]).value
        rows.append(
            {
                "depth": depth,
                "leader": margin.leader.setting_text,
                "loss": loss,
                "below": finite_or_none(floor - loss),
                "second": margin.rival.setting_text,
                "margin": gap.value,
                "low": finite_or_none(gap.low),
                "high": finite_or_none(gap.high),
                "pairs": gap.n,
                "settings": margin.others + 1,
                "verdict": verdict_of(gap),
                "digits": max(digits_of(gap), 3),
            }
        )
    return rows


def verdict_of(gap: Mean) -> str:
    """Return the verdict on the interval of a margin, in words."""
    if not math.isfinite(gap.low):
        if gap.n >= LEAST_SEEDS:
            return "no interval: the seeds change nothing"
        return NO_INTERVAL if gap.n else "no interval: no shared seed"
    if gap.high < 0:
        return "not clear: the settings have other seeds"
    return "clear" if gap.low > 0 else "not clear: the interval includes 0"


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


def growth_sentences(runs: Runs, updates: pd.DataFrame | None) -> list[str]:
    """Return a sentence for each setting and step on the growth of ‖ΔF‖ with depth.

    updates: the table of the chart update_vs_depth, whose steps count; None without the chart.
    """
    if updates is None:
        return []
    sentences = []
    for step in steps_of(updates["panel"].dropna().map(str).tolist()):
        growths = growths_of(runs, step)
        sentences += list(map(growth_sentence, growths[:MOST_NAMES]))
        if len(growths) > MOST_NAMES:
            sentences.append(f"And {len(growths) - MOST_NAMES} more settings at step {step}.")
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
