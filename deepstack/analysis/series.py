"""Groups runs into series: the runs that differ in depth and seed only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepstack.analysis.settings import (
    DATA,
    DEPTH,
    SCHEME,
    SEED,
    TASK,
    depth_of,
    determines,
    hashable,
    label_of,
    order_of,
    scheme_label,
    setting_value,
    undetermined,
    varying_settings,
)
from deepstack.records import ENDED, Run

# Schemes that remain in a figure that cannot show all.
COMPARED_WITH = ("deepnorm", "post_ln", "pre_ln")


MOST_NAMES = 12


# These mark different experiments even where each depth happens to have only one of them.
NEVER_DEPTH_SETTINGS = (SCHEME, "model.scheme_options.", TASK, DATA)


@dataclass(frozen=True)
class Series:
    """The runs that differ in depth and seed only: one line of a chart.

    label: the values that differ from other series. numeric: that value, if it is one number.
    """

    label: str
    runs: tuple[Run, ...]
    numeric: float | None = None

    @property
    def depths(self) -> list[int]:
        return sorted({depth_of(run) for run in self.runs})

    def at(self, depth: int) -> list[Run]:
        """Return the series' runs of one depth, sorted by seed, one per seed."""
        members = one_run_per_seed([run for run in self.runs if depth_of(run) == depth])
        return sorted(members, key=lambda run: int(run.get(SEED, 0)))

    @property
    def by_depth(self) -> dict[float, list[Run]]:
        return {depth: self.at(depth) for depth in self.depths}


def one_run_per_seed(runs: Sequence[Run]) -> list[Run]:
    """Return one run per seed: the last finished one, or else the last one.

    Runs that differ in intervals of measurements only are one sample of a mean.
    """
    ended = sorted(runs, key=lambda run: run.state in ENDED)
    return list({run.get(SEED): run for run in ended}.values())


def split_series(runs: Sequence[Run], but: Sequence[str] = ()) -> tuple[list[Series], list[str]]:
    """Group runs into series; also return the depth settings (see `analysis.settings`).

    Each combination of the independent settings is a series.  Its label names dependent settings
    too (a learning rate chosen for each scheme), apart from d_ff, and no depth settings.
    Keys in `but` are ignored.
    """
    keys = [key for key in varying_settings(runs) if key not in but]
    keys.sort(key=lambda key: key != SCHEME)
    independent: list[str] = []
    for key in keys:
        if not determines(independent, key, runs):
            independent.append(key)
    dependent = [key for key in keys if key not in independent and key != "model.d_ff"]
    fixed = [key for key in independent if key.startswith(NEVER_DEPTH_SETTINGS)]
    free = [key for key in independent if key not in fixed]
    kept = {*fixed, *undetermined(free, [DEPTH, *fixed], runs)}
    depth_settings = [key for key in reversed(independent) if key not in kept]
    independent = [key for key in independent if key in kept]
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        values = tuple(hashable(setting_value(run, key)) for key in independent)
        groups.setdefault(values, []).append(run)
    series = []
    for values in sorted(groups, key=lambda values: [order_of(value) for value in values]):
        members = groups[values]
        number = values[0] if len(values) == 1 and isinstance(values[0], (int, float)) else None
        label = label_of(members[0], [*independent, *dependent], runs) or scheme_label(members[0])
        series.append(Series(label, tuple(members), number))
    return series, depth_settings


def is_ordered(series: Sequence[Series]) -> bool:
    """Return whether one number distinguishes each series from the others."""
    return all(s.numeric is not None for s in series)


def choose_series(series: Sequence[Series], limit: int) -> tuple[list[Series], list[str]]:
    """Return at most `limit` of the series, and a note that names the others.

    Series of the schemes in COMPARED_WITH stay; the others are evenly spaced.
    """
    first = [s for s in series if s.numeric is None and s.runs[0].get(SCHEME) in COMPARED_WITH]
    first = first if len(first) <= limit else []
    others = evenly_spaced([s for s in series if s not in first], limit - len(first))
    chosen = [s for s in series if s in first or s in others]
    return chosen, left_out_note([s.label for s in series if s not in chosen])


def choose_panels(
    series: Sequence[Series], limit: int
) -> tuple[list[tuple[str, list[Run]]], list[str]]:
    """Return label and runs of each panel, and notes on runs without a panel.

    One setting: a panel per depth.  Several: each at its greatest depth, named if depths differ.
    """
    if len(series) == 1:
        depths = series[0].depths
        notes = [f"{limit} of {len(depths)} depths"] if len(depths) > limit else []
        return [(f"N = {n}", series[0].at(n)) for n in evenly_spaced(depths, limit)], notes
    shown, left = choose_series(series, limit)
    several = len({n for s in shown for n in s.depths}) > 1
    labelled = []
    for s in shown:
        n = s.depths[-1]
        labelled.append((f"{s.label}, N = {n}" if several else s.label, s.at(n)))
    notes = ["each at its greatest depth"] if any(len(s.depths) > 1 for s in shown) else []
    return labelled, notes + left


def left_out_note(labels: Sequence[str]) -> list[str]:
    """Return a note with the names of the series that a figure leaves out."""
    names = "; ".join(labels[:MOST_NAMES])
    more = f" and {len(labels) - MOST_NAMES} more" if len(labels) > MOST_NAMES else ""
    return [f"left out: {names}{more}"] if labels else []


def evenly_spaced(values: Sequence[Any], limit: int) -> list[Any]:
    """Return at most `limit` evenly spaced values, with the first and the last."""
    if len(values) <= limit:
        return list(values)
    if limit <= 1:
        return list(values[:limit])
    picks = {round(i * (len(values) - 1) / (limit - 1)) for i in range(limit)}
    return [values[i] for i in sorted(picks)]
