"""Shared parts of charts: points, bands, levels, marks, published values, names of axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepstack.analysis.captions import seeds_note
from deepstack.analysis.fit import Fit
from deepstack.analysis.series import Series, is_ordered, split_series
from deepstack.analysis.statistics import SOME_DIVERGED, Point, Spread
from deepstack.plots.chart import Options, Table
from deepstack.plots.page import Handle, typeset
from deepstack.plots.style import DIVERGED_MARKER, GREY, extent, line_style
from deepstack.records import Run

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

ALL_DIVERGED = "all seeds diverged: last finite value"

# A horizontal line that data are compared with.
DASHED: dict[str, Any] = {"color": GREY, "lw": 0.9, "ls": (0, (5, 1.6))}
LEVELS: dict[str, tuple[str, Any]] = {
    "unigram_entropy": ("unigram entropy", (0, (5, 1.6))),
    "context_free_entropy": ("best without context", (0, (1.2, 1.2))),
    "uniform_entropy": ("uniform guess", (0, (5, 1.4, 1.2, 1.4))),
    "bayes_loss": ("Bayes optimum", "-"),
}


def draw_points(axes: Axes, points: Sequence[Point], style: dict[str, Any]) -> None:
    """A line through the points with its band; marked points are hollow, diverged ones alone."""
    joined = [point for point in points if point.mark != "diverged"]
    x = [point.depth for point in joined]
    spreads = [point.value for point in joined]
    draw_line(axes, x, spreads, color=style["color"], linestyle=style["linestyle"])
    for point in points:
        marker = DIVERGED_MARKER if point.mark == "diverged" else style["marker"]
        axes.plot(
            point.depth,
            point.value.mean,
            marker=marker,
            color=style["color"],
            markerfacecolor="white" if point.mark else style["color"],
            markersize=5.2 if point.mark == "diverged" else None,
            linestyle="none",
            zorder=3,
        )


def draw_line(axes: Axes, x: Sequence[float], spreads: Sequence[Spread], **style: Any) -> None:
    """Draw a line through the means, with its band; style: keywords of `plot`, with `color`."""
    axes.plot(x, [summary.mean for summary in spreads], **style)
    low, high = [summary.low for summary in spreads], [summary.high for summary in spreads]
    draw_band(axes, x, low, high, style["color"])


def draw_band(axes: Axes, x: ArrayLike, low: ArrayLike, high: ArrayLike, colour: Any) -> None:
    """The band between low and high where they are known; a bar where nothing beside it is."""
    at, bottom, top = (np.asarray(values, dtype=float) for values in (x, low, high))
    known = np.isfinite(bottom) & np.isfinite(top)
    axes.fill_between(at, bottom, top, where=known.tolist(), color=colour, alpha=0.18, lw=0)
    beside = np.concatenate(([False], known[:-1])) | np.concatenate((known[1:], [False]))
    lone = known & ~beside
    if lone.any():
        axes.vlines(at[lone], bottom[lone], top[lone], color=colour, alpha=0.3, lw=3)


def log_extent(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Limits of a log axis around the values of rows and their bands.

    A band that reaches down to zero has no end there: it is cut at a third of the least value.
    """
    middle = [row["y"] for row in rows if row.get("y") is not None and row["y"] > 0]
    least = min(middle, default=0.0) / 3
    edges = [row[key] for row in rows for key in ("low", "high") if row.get(key) is not None]
    return extent([*middle, *(max(edge, least) for edge in edges if math.isfinite(edge))])


def deviation_handle(counts: Iterable[int]) -> list[Handle]:
    """Return the legend entry of a band over so many seeds, if some band has more than one."""
    note = seeds_note(counts)
    label = f"± 1 standard deviation, {note}"
    return [Patch(color=GREY, alpha=0.3, lw=0, label=label)] if note else []


def draw_level(axes: Axes, y: float, series: str, panel: str | None, table: Table) -> None:
    """Draw one dashed horizontal line, and add its row to the table."""
    axes.axhline(y, zorder=1.5, **DASHED)
    table.add(panel=panel, series=series, kind="level", y=y)


def write_no_value(axes: Axes) -> None:
    """Write `no value` into an empty panel."""
    axes.text(0.5, 0.5, "no value", color=GREY, ha="center", transform=axes.transAxes)


def mark_handles(
    marks: set[str], saturated: str = "saturated", gone: str = "diverged"
) -> list[Handle]:
    """Legend entries for the marks that were used; `gone` is the label of the cross."""
    known = {
        "saturated": ("o", saturated),
        SOME_DIVERGED: ("o", "some seeds diverged: mean of the others"),
        "diverged": (DIVERGED_MARKER, gone),
    }
    return [
        Line2D([], [], color=GREY, mfc="white", ls="none", marker=marker, label=label)
        for mark, (marker, label) in known.items()
        if mark in marks
    ]


def axis_label(runs: Sequence[Run], name: str, words: str) -> str:
    """`model update ‖ΔF‖`, `loss L (nats)`: words, and the symbol and unit that the runs state."""
    for run in runs:
        for section in ("columns", "layers"):
            entry = run.columns.get(section, {}).get(name)
            if isinstance(entry, dict):
                unit = f" ({entry['unit']})" if entry.get("unit") else ""
                return f"{words} {typeset(str(entry.get('symbol', '')))}".rstrip() + unit
    return words


def draw_levels(
    axes: Axes, levels: Sequence[tuple[str, float]], table: Table, panel: str | None
) -> None:
    """Horizontal lines to compare a loss with."""
    for name, value in levels:
        axes.axhline(value, color=GREY, lw=0.9, ls=LEVELS[name][1], zorder=1.5)
        table.add(panel=panel, series=LEVELS[name][0], kind="level", y=value)


def level_handles(levels: Sequence[tuple[str, float]]) -> list[Handle]:
    """Legend entries for horizontal lines, with their values where a line has one only."""
    values: dict[str, set[float]] = {}
    for name, value in levels:
        values.setdefault(name, set()).add(value)
    return [
        Line2D(
            [],
            [],
            color=GREY,
            lw=0.9,
            ls=LEVELS[name][1],
            label=LEVELS[name][0] + (f" {min(level_values):.3g}" if len(level_values) == 1 else ""),
        )
        for name, level_values in values.items()
    ]


def draw_reference(
    axes: Axes, options: Options, chart: str, table: Table, panel: str | None
) -> list[Handle]:
    """Published values on top of the runs' own, as crosses; their legend entries."""
    if options.reference is None:
        return []
    rows = options.reference[options.reference["chart"] == chart]
    if "panel" in rows:
        rows = rows[rows["panel"].isna() | (rows["panel"] == panel)]
    handles: list[Handle] = []
    for i, (label, group) in enumerate(rows.groupby("label", sort=False)):
        line = axes.plot(
            group["x"],
            group["y"],
            color="#222222",
            marker="+x1234"[i % 6],
            ls=":",
            lw=0.7,
            label=str(label),
            zorder=2.5,
        )
        handles += line
        for _, row in group.iterrows():
            table.add(panel=panel, series=label, kind="reference", x=row["x"], y=row["y"])
    return handles


def line_styles(series: Sequence[Series], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Colour, line and marker of each series: those that it has among all runs of the folder.

    A chart that can show some of the runs only gives none of them another's colour.
    """
    every = split_series(runs)[0]
    home = {run: i for i, s in enumerate(every) for run in s.runs}
    places = [home.get(s.runs[0], -1) for s in series]
    if -1 in places or len(set(places)) < len(series):  # here something else tells them apart
        every, places = list(series), list(range(len(series)))
    return [line_style(i, len(every), is_ordered(every)) for i in places]


def add_points(
    table: Table,
    panel: str | None,
    series: str,
    points: Sequence[Point],
    fit: Fit | None = None,
) -> None:
    """Add the rows of one line, and of its fit."""
    for point in points:
        mean, low, high, n = point.value
        table.add(
            panel=panel, series=series, kind="point", x=point.depth, y=mean, low=low, high=high,
            n=n, mark=point.mark or None,
        )  # fmt: skip
    add_fit(table, panel, series, fit)


def add_fit(table: Table, panel: str | None, series: str, fit: Fit | None) -> None:
    """Add the row of a fit, if there is one."""
    if fit is not None:
        table.add(
            panel=panel, series=series, kind="fit", n=fit.n, exponent=fit.exponent,
            standard_error=fit.standard_error, seeds=fit.seeds,
        )  # fmt: skip
