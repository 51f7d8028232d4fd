"""A panel of a chart: draws lines, points and heat maps, and adds their rows to the table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize, to_hex
from matplotlib.transforms import ScaledTranslation

from deepstack.plots.chart import LineStyle, Table
from deepstack.plots.legend import Legend
from deepstack.plots.style import DASHES, DIVERGED_MARKER, GREY, axis_limits, layer_axis
from deepstack.runs.fit import Fit
from deepstack.runs.settings import evenly_spaced

CROWDED = 5  # lines in a panel; more have error bars for bands
BARS = 6  # error bars of such a line
APART, WIDEST = 1.8, 9.0  # points between neighbouring series at one x, and between all of them
MOST_MARKERS = 24  # points of a line up to which each has a marker


@dataclass(frozen=True, eq=False)
class Panel:
    """One panel of a chart, which draws rows and adds them to the chart's table and legend.

    axes: axes in which it draws.
    name: name in the table, None for an only panel.
    table: rows of the chart.
    legend: legend of the chart.
    points_of_series: artists of the points of each series, which are set side by side at the end.
    """

    axes: Axes
    name: str | None
    table: Table
    legend: Legend
    points_of_series: list[list[Artist]] = field(default_factory=list)

    def add(self, rows: pd.DataFrame, line: Mapping[str, Any] | None = None, **values: Any) -> None:
        """Add rows to the table of the chart; values: columns that are equal in all of them.

        line: colour and style of the line of these rows, if they have one.
        """
        here = dict.fromkeys(rows["kind"] if "kind" in rows else [values["kind"]])
        shown = self.table.shown_in(self.axes, self.name)
        shown.kinds |= here
        if line is not None:
            for kind in here:
                shown.add_style(kind, str(values["series"]), line_style(line, kind))
        columns = {"panel": self.name, "axes": self.axes} | values
        for row in rows.to_dict("records"):
            self.table.add(**{str(k): v for k, v in row.items() if v != ""} | columns)

    def add_fit(self, series: str, fit: Fit | None, place: str, line: str = "") -> None:
        """Add the row of a fit, if there is one, and its exponent to the legend.

        place: where the exponent was fitted.
        line: the entry of the legend, by default the series.
        """
        self.legend.fits.setdefault(line or series, {})[place] = fit
        if fit is not None:
            row = {
                name: getattr(fit, name) for name in ("n", "exponent", "standard_error", "seeds")
            }
            self.table.add(panel=self.name, series=series, kind="fit", **row)

    def lines(
        self,
        series: str,
        rows: pd.DataFrame,
        *,
        kind: str = "line",
        band: bool = True,
        place: tuple[int, int] = (0, 1),
        ends: bool = True,
        **style: Any,
    ) -> None:
        """Draw rows (x, y; with a band low, high, n; mark) as one line, and add them to the table.

        place: index of this line in its panel, and the number of lines.  More than CROWDED, and
            points without a line, have error bars and markers at some points instead of a band.
        ends: whether a line of diverged runs ends in a hollow mark.
        style: keywords of `plot`.
        """
        if rows.empty:
            return
        if len(rows) == 1 and style.get("marker", "None") == "None":  # one point has no line
            style |= {"marker": "o", "ms": 3}
        bars: list[int] = []
        if len(rows) == 1 or style.get("ls") == "none":
            bars = list(range(len(rows)))
        elif place[1] > CROWDED:
            log = self.axes.get_xscale() == "log"
            bars = bar_places(rows["x"].to_numpy(float), place[0] / place[1], log)
        self.axes.plot(rows["x"], rows["y"], **({"markevery": bars} if bars else {}) | style)
        if band and "low" in rows and bars:
            self._error_bars(rows.iloc[bars], style["color"])
        elif band and "low" in rows:
            known = self._has_spread(rows)
            self.legend.has_bands |= bool(known.any())
            x, low, high = rows[["x", "low", "high"]].to_numpy(float).T
            where, colour = known.tolist(), style["color"]
            self.axes.fill_between(x, low, high, where=where, color=colour, alpha=0.18, lw=0)
        elif "low" in rows:
            rows = rows.assign(low=math.nan, high=math.nan)
        if ends and "mark" in rows and rows["mark"].iloc[-1] == "diverged":
            x, y = rows[["x", "y"]].to_numpy(float)[-1]
            end: Any = {"marker": DIVERGED_MARKER, "mfc": "white", "ms": 5, "color": style["color"]}
            self.axes.plot(x, y, ls="none", zorder=4, **end)
            self.legend.add_marks(["diverged"], ends=True)
        self.add(rows, style, series=series, kind=kind)

    def points(
        self, series: str, rows: pd.DataFrame, style: dict[str, Any], entry: bool = False
    ) -> None:
        """Draw points on a line with error bars: marked ones hollow, diverged ones alone.

        rows: x, y, low, high, n, mark, which go to the table; their kind is `point` if they have
            none.
        entry: whether the legend names the series.  The finished chart has the points of several
            series side by side.
        """
        kind = {} if "kind" in rows else {"kind": "point"}
        self.add(rows, style, series=series, **kind)
        if entry and len(rows):
            self.legend.entry(series, **style)
        joined = rows[rows["mark"] != "diverged"]
        colour = style["color"]
        line = self.axes.plot(joined["x"], joined["y"], color=colour, ls=style["linestyle"])
        artists: list[Artist] = [*line, *self._error_bars(joined, colour)]
        for x, y, mark in zip(rows["x"], rows["y"], rows["mark"], strict=True):
            diverged = mark == "diverged"
            marker, size = (DIVERGED_MARKER, 5.2) if diverged else (style["marker"], None)
            shape: Any = {"marker": marker, "ms": size, "mfc": "white" if mark else colour}
            artists += self.axes.plot(x, y, ls="none", zorder=3, color=colour, **shape)
        if len(rows):
            self.points_of_series.append(artists)
        self.legend.add_marks(rows["mark"])

    def _error_bars(self, rows: pd.DataFrame, colour: Any) -> list[Artist]:
        bars = rows[self._has_spread(rows)]
        if bars.empty:
            return []
        return [self.axes.vlines(bars["x"], bars["low"], bars["high"], color=colour, lw=0.9)]

    def _has_spread(self, rows: pd.DataFrame) -> np.ndarray:
        """Return which rows have a deviation; the legend states their numbers of seeds."""
        known = np.isfinite(rows[["low", "high"]].to_numpy(float)).all(axis=1)
        self.legend.seeds |= set(rows["n"][known].astype(int))
        return known

    def ring(self, x: Any, y: Any, label: str, **style: Any) -> None:
        """Draw a ring around the best of the points just drawn.  label: its legend entry."""
        ring: Any = {"marker": "o", "ms": 9, "mfc": "none", "ls": "none"}
        self.points_of_series[-1] += self.axes.plot(x, y, **style | ring)
        self.legend.entry(label, **ring, mec=GREY)

    def heat_map(
        self,
        steps: np.ndarray,
        values: np.ndarray,
        scale: Normalize,
        rows: Sequence[int] | np.ndarray | None = None,
    ) -> QuadMesh:
        """Draw values (steps, layers) as cells and add them to the table; those it hides are grey.

        rows: the layers, by default 1 to N.
        """
        mesh = draw_cells(self.axes, steps, values, scale, rows)
        layers = np.arange(1, values.shape[1] + 1) if rows is None else rows
        step, layer = (grid.ravel() for grid in np.meshgrid(steps, layers))
        self.add(pd.DataFrame({"x": step, "y": layer, "value": values.T.ravel()}), kind="cell")
        return mesh

    def level(self, y: float, series: str | None, label: str, dash: Any = DASHES[1]) -> None:
        """Draw a horizontal line to compare values with; add the row of a `series` to the table.

        label: the legend entry.
        """
        style: Any = {"color": GREY, "lw": 0.9, "ls": dash}
        self.axes.axhline(y, zorder=1.5, **style)
        self.legend.entry(label, **style)
        if series is None:
            return
        self.table.add(panel=self.name, series=series, kind="level", y=y)
        shown = self.table.shown_in(self.axes, self.name)
        shown.styles.setdefault("level", {})[series] = line_style(style, "level")

    def published(self, rows: pd.DataFrame) -> None:
        """Draw published values as crosses on top of the runs' own, and add them to the table.

        rows: x, y and label of this chart's values, and the panel if it has several.
        """
        if "panel" in rows:
            rows = rows[rows["panel"].isna() | (rows["panel"] == self.name)]
        for i, (label, group) in enumerate(rows.groupby("label", sort=False)):
            style: Any = {"color": "#222222", "marker": "+x1234"[i % 6], "ls": ":", "lw": 0.7}
            x, y = group["x"], group["y"]
            self.axes.plot(x, y, zorder=2.5, **style)
            self.legend.entry(str(label), **style)
            self.add(group[["x", "y"]], series=label, kind="reference")


def split_hidden(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a table that its axes show, and the number of the others.

    A logarithmic axis does not show values at or below 0.
    """
    shown = []
    for row in rows:
        axes = row.get("axes")
        scales = () if axes is None else ((axes.get_xscale(), "x"), (axes.get_yscale(), "y"))
        if not any(scale == "log" and row.get(name, math.nan) <= 0 for scale, name in scales):
            shown.append(row)
    return shown, len(rows) - len(shown)


def line_style(line: Mapping[str, Any], kind: str) -> LineStyle:
    """Return the style of rows of a kind that are drawn with these keywords of `plot`."""
    dash = line.get("ls", line.get("linestyle", "-"))
    lengths = {"-": "", "none": None, ":": "1 1.6", "--": "4 1.6"}
    text = lengths[dash] if isinstance(dash, str) else " ".join(map(str, dash[1]))
    bars = text is None or kind in ("point", "best")
    return LineStyle(to_hex(line["color"]), text, line.get("mfc") == "white", bars)


def place_side_by_side(panels: Sequence[Panel]) -> None:
    """Shift the points of each series by a constant length, so that no error bar hides another."""
    for panel in panels:
        axes, series = panel.axes, panel.points_of_series
        inches = min(APART, WIDEST / max(len(series), 1)) / 72
        for i, artists in enumerate(series):
            shift = ScaledTranslation(
                (i - (len(series) - 1) / 2) * inches, 0, axes.figure.dpi_scale_trans
            )
            for artist in artists:
                artist.set_transform(axes.transData + shift)


def bar_places(x: np.ndarray, shift: float, log: bool) -> list[int]:
    """Return the points of a line that have error bars, evenly spaced in x or log x.

    shift: 0 to 1, which sets the bars of one line beside another line's.
    """
    if len(x) <= BARS:
        return list(range(len(x)))
    at = np.log(x) if log else x
    targets = at[0] + (at[-1] - at[0]) * (np.arange(BARS) + shift) / BARS
    return sorted({int(np.abs(at - target).argmin()) for target in targets})


def draw_cells(
    axes: Axes,
    steps: np.ndarray,
    values: np.ndarray,
    scale: Normalize,
    rows: Sequence[int] | np.ndarray | None = None,
) -> QuadMesh:
    """Draw values (steps, layers) as cells; those that the scale hides are grey.

    rows: the layers, by default 1 to N.
    """
    count, depth = values.shape
    layers = np.arange(1, depth + 1) if rows is None else np.asarray(rows)
    inner = (layers[1:] + layers[:-1]) / 2
    edges = np.concatenate([layers[:1] - 0.5, inner, layers[-1:] + 0.5])
    # An image rather than thousands of paths in the SVG.
    mesh = axes.pcolormesh(
        np.arange(count + 1) - 0.5,
        edges,
        drawable_cells(values, scale),
        norm=scale,
        cmap="viridis",
        rasterized=True,
    )
    axes.set(facecolor="#DDDDDD", xlabel="step t of the snapshot")
    axes.grid(False)
    places = evenly_spaced(range(count), 6)
    axes.set_xticks(places, [str(int(steps[i])) for i in places])
    layer_axis(axes, depth, "y")
    if rows is not None:
        axes.set(ylim=(edges[0], edges[-1]), yticks=evenly_spaced(layers.tolist(), 6))
    return mesh


def drawable_cells(values: np.ndarray, scale: Normalize) -> np.ma.MaskedArray:
    """Return values (steps, layers) as cells (layers, steps), those masked that a scale hides."""
    return np.ma.masked_array(values.T, ~is_drawable(values.T, scale))


def scale_of(values: np.ndarray) -> Normalize:
    """Return the colour scale of a heat map: logarithmic if no finite value is below 0."""
    finite = values[np.isfinite(values)]
    if (finite > 0).any() and (finite >= 0).all():
        return LogNorm(*axis_limits(finite.tolist(), 0.0))
    return Normalize(float(finite.min()), float(finite.max()))


def is_drawable(values: np.ndarray, scale: Normalize) -> np.ndarray:
    """Return where values are finite, and on a logarithmic scale above 0."""
    return np.isfinite(values) & ((values > 0) | (type(scale) is Normalize))


def markers(count: int) -> str | None:
    """Return the marker of a line through so many points, if it has one."""
    return "o" if count <= MOST_MARKERS else None
