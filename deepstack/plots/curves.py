"""Curves over steps: a panel a series, or one for all, depths as shades, seeds as bands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from deepstack.analysis.captions import caption_of, title_of
from deepstack.analysis.series import Series, choose_series, evenly_spaced, split_series
from deepstack.analysis.settings import depth_of
from deepstack.analysis.statistics import has_diverged
from deepstack.analysis.tidy import seed_statistics, tidy
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, Table
from deepstack.plots.page import Handle, Page
from deepstack.plots.style import DIVERGED_MARKER, log_axis, plain_axis, shade, step_axis
from deepstack.plots.values import (
    deviation_handle,
    draw_band,
    draw_reference,
    line_styles,
    log_extent,
    mark_handles,
)
from deepstack.records import Run

if TYPE_CHECKING:
    import pandas as pd

MOST_PANELS = 12
FEW_SERIES = 4
MOST_ENTRIES = 12
MOST_POINTS = 2000


@dataclass
class Panel:
    """One panel of curves: its axes, its name in the table (None for an only one)."""

    axes: Axes
    name: str | None
    table: Table


@dataclass(frozen=True)
class Curve:
    """The seeds of one series at one depth that did not diverge, or one that did."""

    series: int
    depth: int
    runs: tuple[Run, ...]
    diverged: bool

    def points(
        self, column: str, source: str | Callable[[Run], pd.DataFrame] = "steps"
    ) -> np.ndarray:
        """Return `seed_statistics` of its runs for a column of a source of `tidy`."""
        return seed_statistics(tidy(self.runs, column, source, settings=()))


def curves_of(series: Sequence[Series]) -> list[Curve]:
    """The curves of all series: seeds that diverged are drawn one by one."""
    curves = []
    for i, s in enumerate(series):
        for depth in s.depths:
            members = s.at(depth)
            fine = tuple(run for run in members if not has_diverged(run))
            if fine:
                curves.append(Curve(i, depth, fine, False))
            curves += [Curve(i, depth, (run,), True) for run in members if has_diverged(run)]
    return curves


class CurveStyles:
    """Colours and panels of curves.

    Where depth and something else vary, the one with fewer values makes the panels: depths are
    shades and series panels, or, of many series and few depths, the other way round.
    """

    def __init__(self, runs: Sequence[Run], series: Sequence[Series], options: Options) -> None:
        self.series = series
        self.line_styles = line_styles(series, options.runs)
        self.depths = sorted({depth_of(run) for run in runs})
        few = len(series) <= max(FEW_SERIES, len(self.depths))
        self.by_depth = len(self.depths) > 1 and few
        self.left_out: list[str] = []

    def panels(self, curves: Sequence[Curve], most: int) -> list[tuple[str | None, list[Curve]]]:
        """Name (None for an only one) and curves of each panel, at most `most` panels."""
        if self.by_depth and len(self.series) > 1:
            chosen, self.left_out = choose_series(self.series, most)
            return [
                (s.label, [curve for curve in curves if self.series[curve.series] is s])
                for s in chosen
            ]
        if not self.by_depth and len(self.depths) > 1:
            return [
                (f"N = {depth}", [curve for curve in curves if curve.depth == depth])
                for depth in evenly_spaced(self.depths, most)
            ]
        return [(None, list(curves))]

    def style(self, curve: Curve) -> dict[str, Any]:
        """Colour and line of a curve."""
        if self.by_depth:
            index = self.depths.index(curve.depth)
            # Dark for deep: deep runs are the subject of a study.
            return {"color": shade(len(self.depths) - 1 - index, len(self.depths)), "ls": "-"}
        style = self.line_styles[curve.series]
        return {"color": style["color"], "ls": style["linestyle"]}

    def label(self, curve: Curve) -> str:
        """The name of a curve in the table."""
        name = self.series[curve.series].label
        return f"{name}, N = {curve.depth}" if len(self.depths) > 1 else name

    def handles(self, curves: Sequence[Curve]) -> list[Handle]:
        """One legend entry a colour of these curves, a dozen at most."""
        entries: list[Handle] = []
        if self.by_depth:
            for depth in evenly_spaced(sorted({curve.depth for curve in curves}), MOST_ENTRIES):
                style = self.style(Curve(0, depth, (), False))
                entries.append(Line2D([], [], **style, label=f"N = {depth}"))
        else:
            for i in evenly_spaced(sorted({curve.series for curve in curves}), MOST_ENTRIES):
                style = self.style(Curve(i, self.depths[0], (), False))
                entries.append(Line2D([], [], **style, label=self.series[i].label))
        return entries

    def notes(self, shown: int) -> list[str]:
        """Return notes on panels and legend entries that the figure leaves out."""
        colours, panels = len(self.series), len(self.depths)
        if self.by_depth:
            colours, panels = panels, shown
        notes = [f"{shown} of {panels} depths are shown"] if 1 < shown < panels else []
        notes += self.left_out
        if colours > MOST_ENTRIES:
            notes.append(f"the legend names {MOST_ENTRIES} of {colours} lines")
        return notes


def draw_curve(
    panel: Panel,
    curve: Curve,
    label: str,
    points: np.ndarray,
    style: dict[str, Any],
    *,
    kind: str = "line",
    marker: str | None = None,
    band: bool = True,
    ends: bool = True,
) -> None:
    """One curve with its band; a diverged one ends in a hollow mark, if this is where it `ends`."""
    if not len(points):
        return
    x, mean, low, high, _ = points.T
    dot = {"marker": "o", "ms": 3} if len(x) == 1 else {}  # one point has no line
    line = {**dot, **style, **({"marker": marker} if marker else {})}
    panel.axes.plot(x, mean, **line, lw=0.6 if curve.diverged else 1.0)
    if band:
        draw_band(panel.axes, x, low, high, style["color"])
    if curve.diverged and ends:
        panel.axes.plot(
            x[-1], mean[-1], DIVERGED_MARKER, mfc="white", ms=5, color=style["color"], zorder=4
        )
    for row in points:
        spread_known = row[4] > 1
        panel.table.add(
            panel=panel.name,
            series=label,
            kind=kind,
            x=int(row[0]),
            y=row[1],
            low=row[2] if spread_known and band else math.nan,
            high=row[3] if spread_known and band else math.nan,
            n=int(row[4]),
            mark="diverged" if curve.diverged else None,
        )


def thin_out(points: np.ndarray) -> tuple[np.ndarray, int]:
    """At most MOST_POINTS points: every k-th and the last. Returns them and k."""
    stride = math.ceil(len(points) / MOST_POINTS)
    if stride <= 1:
        return points, 1
    keep = sorted({*range(0, len(points), stride), len(points) - 1})
    return points[keep], stride


def grid(count: int) -> tuple[int, int]:
    """Rows and columns for so many panels."""
    columns = count if count <= 3 else 2 if count == 4 else 3
    return math.ceil(count / columns), columns


def draw_curves(
    runs: list[Run],
    column: str,
    *,
    chart: str,
    title: str,
    y_label: str,
    options: Options,
    prepare: Callable[[Panel], None],
    handles: Sequence[Handle],
    source: str | Callable[[Run], pd.DataFrame] = "steps",
) -> Chart:
    """One column of steps.csv, or of another source, against the step.

    Both axes are logarithmic; that of values is plain where some are negative or none is positive.
    """
    series, depth_settings = split_series(runs)
    styles = CurveStyles(runs, series, options)
    panels = styles.panels(curves_of(series), MOST_PANELS)
    points = {curve: curve.points(column, source) for _, curves in panels for curve in curves}
    points = {
        curve: rows_of_curve[rows_of_curve[:, 0] > 0] for curve, rows_of_curve in points.items()
    }
    values = np.concatenate([rows_of_curve[:, 1] for rows_of_curve in points.values()])
    logarithmic = bool((values > 0).any() and (values >= 0).all())
    if logarithmic:
        points = {
            curve: rows_of_curve[rows_of_curve[:, 1] > 0] for curve, rows_of_curve in points.items()
        }
    lost = [name for name, curves in panels if not any(len(points[curve]) for curve in curves)]
    shown = [(name, curves) for name, curves in panels if name not in lost]
    if not shown:
        raise NothingMatchedError(f"no run has a finite value of {column} after a step")
    rows, columns = grid(len(shown))
    page = Page(rows, columns, panels=len(shown), height=1.9 if len(shown) == 1 else 1.5)
    table = Table()
    stride = 1
    published: list[Handle] = []
    for axes, (name, curves) in zip(page.axes, shown, strict=True):
        axes.set_title(name or "")
        panel = Panel(axes, name, table)
        prepare(panel)
        for curve in curves:
            drawable, every = thin_out(points[curve])
            stride = max(stride, every)
            draw_curve(panel, curve, styles.label(curve), drawable, styles.style(curve))
        published = draw_reference(axes, options, chart, table, name) or published
    drawn = [row for row in table.rows if row.get("x") is not None]
    steps = [row["x"] for row in drawn]
    ends = [row[key] for row in table.rows for key in ("y", "low", "high") if key in row]
    for axes in page.axes:
        if logarithmic:
            log_axis(axes, "y", *log_extent(table.rows))
        else:
            plain_axis(axes, [end for end in ends if math.isfinite(end)])
        step_axis(axes, int(min(steps)), int(max(steps)))
        axes.set_ylabel(y_label)
    if len(page.axes) > 1:
        page.outer_labels_only()
    entries = styles.handles([c for c in points if len(points[c])]) if len(runs) > 1 else []
    entries += handles
    entries += mark_handles({row["mark"] for row in drawn if row.get("mark")})
    entries += band_handle(table)
    notes = caption_of(runs, depth_settings) + styles.notes(len(panels))
    if lost:
        value = "finite value above 0" if logarithmic else "finite value"
        notes.append(f"no {value} of {', '.join(map(str, lost))}")
    if logarithmic and (values == 0).any():
        notes.append("zeros are not drawn")
    if stride > 1:
        notes.append(f"one step in {stride} is drawn")
    figure = page.finish(title, title_of(runs, series), notes, entries + published)
    return Chart(figure, table.frame(), title)


def band_handle(table: Table) -> list[Handle]:
    """The legend entry that says what bands are, where there are any."""
    counts = [
        r["n"] for r in table.rows if r.get("n", 0) > 1 and math.isfinite(r.get("low", math.nan))
    ]
    return deviation_handle(counts)
