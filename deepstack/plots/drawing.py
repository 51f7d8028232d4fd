"""Draws the rows of a chart: lines, points and heat maps, in panels that collect its table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from deepstack.analysis.captions import caption_of, seeds_note, title_of
from deepstack.analysis.fit import Fit
from deepstack.analysis.settings import evenly_spaced
from deepstack.analysis.statistics import SOME_DIVERGED
from deepstack.plots.chart import Chart, Options, Table
from deepstack.plots.page import Handle, Page, typeset
from deepstack.plots.series import groups_of, series_of, series_styles
from deepstack.plots.style import (
    COLUMN,
    DASHES,
    DIVERGED_MARKER,
    GREY,
    extent,
    layer_axis,
    log_axis,
    number,
    plain_axis,
)
from deepstack.records import Run

ALL_DIVERGED = "all seeds diverged: last finite value"
EDGE_RATE = "edge"
AT_CHANCE = "at_chance"
# Marks of points, in the order of the legend: marker and words.
MARKS = {
    "saturated": ("o", "saturated: above 0.3 of unrelated states"),
    SOME_DIVERGED: ("o", "some seeds diverged: mean of the others"),
    "diverged": (DIVERGED_MARKER, "diverged"),
    ALL_DIVERGED: (DIVERGED_MARKER, ALL_DIVERGED),
    EDGE_RATE: ("o", "best rate tried lies at the edge"),
    AT_CHANCE: ("o", "no seed learnt: at chance or worse"),
}
MOST_BANDS = 5  # series in a panel up to which each has a band; more have error bars
MOST_MARKERS = 24  # points of a line up to which each has a marker


@dataclass(frozen=True)
class Panel:
    """One panel of a drawing: its axes, and its name in the table (None for an only one)."""

    drawing: Drawing
    axes: Axes
    name: str | None

    def add(self, rows: pd.DataFrame, **values: Any) -> None:
        """Add rows to the table of the chart; values: columns that are equal in all of them."""
        columns = {"panel": self.name} | values
        for row in rows.to_dict("records"):
            self.drawing.table.add(**{str(k): v for k, v in row.items() if v != ""} | columns)

    def add_fit(self, series: str, fit: Fit | None) -> None:
        """Add the row of a fit, if there is one."""
        if fit is not None:
            row = {
                name: getattr(fit, name) for name in ("n", "exponent", "standard_error", "seeds")
            }
            self.drawing.table.add(panel=self.name, series=series, kind="fit", **row)


class Drawing:
    """A chart while it is drawn: its runs, panels, table, and what its legend must explain."""

    def __init__(self, runs: Sequence[Run], options: Options, but: Sequence[str] = ()) -> None:
        """Split runs into series; `but`: settings that make no series."""
        self.runs, self.options, self.table = runs, options, Table()
        self.but = but
        self.series, self.depth_settings = series_of(runs, options, but)
        self.panels: list[Panel] = []
        self.levels: dict[tuple[str, Any], set[float]] = {}
        self.marks: set[str] = set()
        self.has_bands = False
        self.spread = "± 1 standard deviation"  # the meaning of bands and bars
        self.seeds: set[int] = set()
        self.published: dict[str, Line2D] = {}

    @cached_property
    def styles(self) -> list[dict[str, Any]]:
        """Colour, line and marker of each series (see `series_styles`)."""
        return series_styles(self.series, self.options.runs or self.runs, self.but)

    def groups(self) -> list[tuple[str, list[int]]]:
        """Return the groups of series that have panels of their own (see `groups_of`)."""
        return groups_of(self.series, self.runs, self.options)

    def limit(self, most: int) -> int:
        """Return the number of panels to show: `most`, or all if the user chose the schemes."""
        return max(most, len(self.series)) if self.options.schemes else most

    def add_panels(
        self,
        names: Sequence[str | None],
        *,
        titles: Sequence[str] | None = None,
        columns: int | None = None,
        height: float | None = None,
    ) -> list[Panel]:
        """Make the panels and return them; titles: by default their names, none for an only one."""
        count = len(names)
        across = columns or (count if count <= 3 else 2 if count == 4 else 3)
        high = height or (1.9 if count == 1 else 1.5)
        paper, width = self.options.style == "paper", self.options.width
        if paper and columns is None:
            across = min(across, 2)
        if paper and width is None and across <= 2:
            width = COLUMN
        rows = math.ceil(count / across)
        self.page = Page(rows, across, panels=count, height=high, width=width, texts=not paper)
        for i, (axes, name) in enumerate(zip(self.page.axes, names, strict=True)):
            axes.set_title(titles[i] if titles else (name or "") if count > 1 else "")
            self.panels.append(Panel(self, axes, name))
        return self.panels

    def rows(self, *kinds: str, panels: Sequence[Panel] | None = None) -> pd.DataFrame:
        """Return the rows of the table so far, of these kinds and panels."""
        table = pd.DataFrame(self.table.rows, columns=["panel", "series", "kind", "x", "y", "low",
                                                       "high", "n"])  # fmt: skip
        chosen = table["kind"].isin(kinds) if kinds else table["kind"].notna()
        if panels is not None:
            chosen &= table["panel"].isin([panel.name for panel in panels])
        return table[chosen]

    def value_axis(
        self,
        label: str,
        panels: Sequence[Panel],
        *kinds: str,
        log: bool = True,
        include: float = math.nan,
    ) -> None:
        """Give panels one scale of values, around their rows (of these kinds) and `include`.

        A band that reaches down to zero has no end on a log axis: it is cut at a third of the least
        value.
        """
        if self.options.y_scale is not None:
            log = self.options.y_scale == "log"
        middle, low, high = self.rows(*kinds, panels=panels)[["y", "low", "high"]].to_numpy(float).T
        middle, edges = np.append(middle, include), np.append(low, high)
        edges = edges[np.isfinite(edges)]
        if log and len(positive := middle[middle > 0]):
            edges = np.maximum(edges, positive.min() / 3)
        values = [value for value in (*middle, *edges) if math.isfinite(value)]
        for panel in panels:
            panel.axes.set_ylabel(label)
            if log:
                log_axis(panel.axes, "y", *extent(values))
            elif values:
                plain_axis(panel.axes, values)

    def finish(
        self,
        title: str,
        notes: Sequence[str],
        handles: Sequence[Handle] = (),
        legend_title: str | None = None,
    ) -> Chart:
        """Return the chart with legend and caption: `notes`, then the settings of the runs."""
        drawn = {r.get("panel") for r in self.table.rows if r["kind"] not in ("level", "reference")}
        for panel in self.panels:
            if (panel.name or None) not in drawn:
                style: Any = {"color": GREY, "ha": "center", "transform": panel.axes.transAxes}
                panel.axes.text(0.5, 0.5, "no value", **style)
        if self.options.x_scale is not None:
            self._scale_x(self.options.x_scale)
        caption = [*notes, *caption_of(self.runs, self.depth_settings)]
        subtitle = title_of(self.runs, self.series)
        entries = [*handles, *self._explanations()]
        figure = self.page.finish(title, subtitle, caption, entries, legend_title)
        text = "\n".join([f"{title}. {subtitle}.", *caption, ""]).replace("\u00a0", " ")
        return Chart(figure, self.table.frame(), title, re.sub(r"\$_\{(.*?)\}\$", r"_\1", text))

    def _scale_x(self, scale: str) -> None:
        """Give the panels of lines and points a linear or logarithmic x axis."""
        for panel in self.panels:
            x = self.rows(panels=[panel])["x"].to_numpy(float)
            x = x[np.isfinite(x) & (x > 0)] if scale == "log" else x[np.isfinite(x)]
            if not panel.axes.lines or not len(x):
                continue
            if scale == "log":
                log_axis(panel.axes, "x", *extent(x.tolist()))
                continue
            margin = 0.04 * (x.max() - x.min()) or 0.5
            panel.axes.set(xscale="linear", xlim=(x.min() - margin, x.max() + margin))
            panel.axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            panel.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
            panel.axes.xaxis.set_minor_locator(NullLocator())

    def _explanations(self) -> list[Handle]:
        """Return the legend of levels, marks, bands and published values."""
        entries: list[Handle] = []
        for (label, dash), values in self.levels.items():
            words = label.format(f" {min(values):.3g}" if len(values) == 1 else "")
            entries.append(Line2D([], [], color=GREY, lw=0.9, ls=dash, label=words))
        style: Any = {"color": GREY, "mfc": "white", "ls": "none"}
        for mark, (marker, words) in MARKS.items():
            if mark in self.marks:
                entries.append(Line2D([], [], marker=marker, label=words, **style))
        if note := seeds_note(self.seeds):
            label = f"{self.spread}, {note}"
            if self.has_bands:
                entries.append(Patch(color=GREY, alpha=0.3, lw=0, label=label))
            else:
                style = {"marker": "|", "ms": 7, "ls": "none", "color": GREY}
                entries.append(Line2D([], [], label=label, **style))
        return entries + list(self.published.values())


def lines(
    panel: Panel,
    series: str,
    rows: pd.DataFrame,
    *,
    kind: str = "line",
    band: bool = True,
    bars: Sequence[int] | None = None,
    ends: bool = True,
    **style: Any,
) -> None:
    """Draw rows (x, y; with a band low, high, n; mark) as one line, and add them to the table.

    bars: rows (by position) with an error bar, instead of a band.  ends: whether a line of diverged
    runs ends in a hollow mark.  style: keywords of `plot`.
    """
    if rows.empty:
        return
    if len(rows) == 1 and "marker" not in style:  # one point has no line
        style |= {"marker": "o", "ms": 3}
    panel.axes.plot(rows["x"], rows["y"], **style)
    if band and "low" in rows:
        draw_band(panel, rows, style["color"], bars)
    elif "low" in rows:
        rows = rows.assign(low=math.nan, high=math.nan)
    if ends and "mark" in rows and rows["mark"].iloc[-1] == "diverged":
        x, y = rows[["x", "y"]].to_numpy(float)[-1]
        end: Any = {"marker": DIVERGED_MARKER, "mfc": "white", "ms": 5, "color": style["color"]}
        panel.axes.plot(x, y, ls="none", zorder=4, **end)
        panel.drawing.marks.add("diverged")
    panel.add(rows, series=series, kind=kind)


def points(
    panel: Panel, series: str, rows: pd.DataFrame, style: dict[str, Any], bars: bool = False
) -> None:
    """Draw rows as points on a line with its band or error bars, and add them to the table."""
    draw_points(panel, rows, style, bars)
    panel.add(rows, series=series, kind="point")


def draw_points(
    panel: Panel, rows: pd.DataFrame, style: dict[str, Any], bars: bool = False
) -> None:
    """Draw points on a line with its band or bars: marked ones hollow, diverged ones alone."""
    joined = rows[rows["mark"] != "diverged"]
    panel.axes.plot(joined["x"], joined["y"], color=style["color"], ls=style["linestyle"])
    draw_band(panel, joined, style["color"], range(len(joined)) if bars else None)
    for x, y, mark in zip(rows["x"], rows["y"], rows["mark"], strict=True):
        diverged = mark == "diverged"
        face = "white" if mark else style["color"]
        marker, size = (DIVERGED_MARKER, 5.2) if diverged else (style["marker"], None)
        shape: Any = {"marker": marker, "ms": size, "mfc": face, "color": style["color"]}
        panel.axes.plot(x, y, ls="none", zorder=3, **shape)
    panel.drawing.marks |= {ALL_DIVERGED if m == "diverged" else m for m in rows["mark"] if m}


def heat_map(
    panel: Panel,
    steps: np.ndarray,
    values: np.ndarray,
    scale: Normalize,
    rows: Sequence[int] | np.ndarray | None = None,
) -> QuadMesh:
    """Draw values (steps, layers) as cells, and add them to the table; those it hides are grey.

    rows: the layers, by default 1 to N.
    """
    values = values.T
    depth, count = values.shape
    drawable = is_drawable(values, scale)
    layers = np.arange(1, depth + 1) if rows is None else np.asarray(rows)
    edges = np.concatenate([layers[:1] - 0.5, (layers[1:] + layers[:-1]) / 2, layers[-1:] + 0.5])
    # An image rather than thousands of paths in the SVG.
    mesh = panel.axes.pcolormesh(
        np.arange(count + 1) - 0.5,
        edges,
        np.ma.masked_array(values, ~drawable),
        norm=scale,
        cmap="viridis",
        rasterized=True,
    )
    panel.axes.set(facecolor="#DDDDDD", xlabel="step t of the snapshot")
    panel.axes.grid(False)
    places = evenly_spaced(range(count), 6)
    panel.axes.set_xticks(places, [str(int(steps[i])) for i in places])
    layer_axis(panel.axes, depth, "y")
    if rows is not None:
        panel.axes.set(ylim=(edges[0], edges[-1]), yticks=evenly_spaced(layers.tolist(), 6))
    step, layer = (grid.ravel() for grid in np.meshgrid(steps, layers))
    panel.add(pd.DataFrame({"x": step, "y": layer, "value": values.ravel()}), kind="cell")
    return mesh


def is_drawable(values: np.ndarray, scale: Normalize) -> np.ndarray:
    """Return where values are finite, and on a logarithmic scale above 0."""
    return np.isfinite(values) & ((values > 0) | (type(scale) is Normalize))


def draw_band(
    panel: Panel, rows: pd.DataFrame, colour: Any, bars: Sequence[int] | None = None
) -> None:
    """Draw the band between low and high where they are known; a bar where nothing beside it is.

    bars: the rows, by position, that have a bar instead of the band.
    """
    x, low, high = rows[["x", "low", "high"]].to_numpy(float).T
    known = np.isfinite(low) & np.isfinite(high)
    panel.drawing.seeds |= set(rows["n"][known].astype(int))
    if bars is not None:
        chosen = known & np.isin(np.arange(len(x)), list(bars))
        if chosen.any():
            panel.axes.vlines(x[chosen], low[chosen], high[chosen], color=colour, lw=0.9)
        return
    panel.drawing.has_bands |= bool(known.any())
    panel.axes.fill_between(x, low, high, where=known.tolist(), color=colour, alpha=0.18, lw=0)
    beside = np.concatenate(([False], known[:-1])) | np.concatenate((known[1:], [False]))
    lone = known & ~beside
    if lone.any():
        panel.axes.vlines(x[lone], low[lone], high[lone], color=colour, alpha=0.3, lw=3)


def level(panel: Panel, y: float, series: str | None, label: str, dash: Any = DASHES[1]) -> None:
    """Draw a horizontal line to compare values with, and add the row of a `series` to the table.

    label: the legend entry; a `{}` in it is replaced by the value, if all panels have the same.
    """
    panel.axes.axhline(y, color=GREY, lw=0.9, ls=dash, zorder=1.5)
    panel.drawing.levels.setdefault((label, dash), set()).add(y)
    if series:
        panel.drawing.table.add(panel=panel.name, series=series, kind="level", y=y)


def published(panel: Panel) -> None:
    """Draw published values as crosses on top of the runs' own, and add them to the table."""
    rows = panel.drawing.options.reference
    if rows is None:
        return
    if "panel" in rows:
        rows = rows[rows["panel"].isna() | (rows["panel"] == panel.name)]
    for i, (label, group) in enumerate(rows.groupby("label", sort=False)):
        style: Any = {"color": "#222222", "marker": "+x1234"[i % 6], "ls": ":", "lw": 0.7}
        x, y = group["x"], group["y"]
        (line,) = panel.axes.plot(x, y, label=str(label), zorder=2.5, **style)
        panel.drawing.published[str(label)] = line
        panel.add(group[["x", "y"]], series=label, kind="reference")


def markers(count: int) -> str | None:
    """Return the marker of a line through so many points, if it has one."""
    return "o" if count <= MOST_MARKERS else None


def axis_label(
    runs: Sequence[Run], name: str, words: str, sections: Sequence[str] = ("columns", "layers")
) -> str:
    """Return words with the symbol and unit that the runs state: `model update ‖ΔF‖`.

    sections: of columns.json, in the order in which the name is looked up.
    """
    for run in runs:
        for section in sections:
            entry = run.columns.get(section, {}).get(name)
            if isinstance(entry, dict):
                unit = f" ({entry['unit']})" if entry.get("unit") else ""
                return f"{words} {typeset(str(entry.get('symbol', '')))}".rstrip() + unit
    return words
