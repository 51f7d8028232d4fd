"""The series of a chart: their order, colours, and the panels that share them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from deepstack.analysis.settings import (
    SCHEME,
    Series,
    find_key,
    label_of,
    order_of,
    split_series,
    values_of,
    varying_settings,
)
from deepstack.plots.chart import Options
from deepstack.plots.style import scheme_style, setting_style
from deepstack.records import Run

MOST_LINES = 6  # series in a panel up to which several settings share it


def scheme_of(series: Series) -> str:
    """Return the name of the scheme of a series."""
    return str(series.runs[0].get(SCHEME, "?"))


def series_of(
    runs: Sequence[Run], options: Options, but: Sequence[str] = ()
) -> tuple[list[Series], list[str]]:
    """Return `split_series` of runs, in the order of runs or schemes that the user chose."""
    series, depth_settings = split_series(runs, but)
    if options.ordered:
        order = {run: i for i, run in enumerate(runs)}
        series.sort(key=lambda s: min(order[run] for run in s.runs))
    if options.schemes:
        series.sort(key=lambda s: options.schemes.index(scheme_of(s)))
    return series, depth_settings


def series_styles(
    series: Sequence[Series], runs: Sequence[Run], but: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return colour, line and marker of each series: those of its scheme, everywhere the same.

    If a scheme has several series, the values of its other settings among `runs` are shades.
    """
    every, depth_settings = split_series(runs, but)
    ignored = (SCHEME, *depth_settings, *but)
    keys = [key for key in varying_settings(runs) if key not in ignored]
    count = Counter(scheme_of(s) for s in every)
    shades = sorted(
        {values_of(s.runs[0], keys) for s in every if count[scheme_of(s)] > 1},
        key=lambda values: [order_of(value) for value in values],
    )
    styles = []
    for s in series:
        values = values_of(s.runs[0], keys)
        shade = (shades.index(values), len(shades)) if values in shades else (0, 1)
        styles.append(setting_style(scheme_style(scheme_of(s)), *shade))
    return styles


def groups_of(
    series: Sequence[Series], runs: Sequence[Run], options: Options
) -> list[tuple[str, list[Series]]]:
    """Return name and members of each group of series that has separate panels.

    The user names the setting; else many series of several settings have panels by scheme.
    """
    schemes = {scheme_of(s) for s in series}
    key: str | None = None
    if options.panels is not None:
        key = find_key(options.panels, runs)
    elif len(series) > MOST_LINES and 1 < len(schemes) < len(series):
        key = SCHEME
    if key is None:
        return [("", list(series))]
    groups: dict[str, list[Series]] = {}
    for s in series:
        groups.setdefault(label_of(s.runs[0], [key], runs), []).append(s)
    return list(groups.items())
