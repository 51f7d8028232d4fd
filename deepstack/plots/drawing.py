"""Draws the rows of a chart: lines, points and heat maps, in panels that collect its table."""

from __future__ import annotations

import math
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

from deepstack.analysis.captions import caption_of, seeds_note, title_of
from deepstack.analysis.fit import Fit
from deepstack.analysis.settings import evenly_spaced, is_ordered, split_series
from deepstack.analysis.statistics import SOME_DIVERGED
from deepstack.plots.chart import Chart, Options, Table
from deepstack.plots.page import Handle, Page, typeset
from deepstack.plots.style import (
    DASHES,
    DIVERGED_MARKER,
    GREY,
    extent,
    layer_axis,
    line_style,
    log_axis,
    plain_axis,
)
from deepstack.records import Run

ALL_DIVERGED = "all seeds diverged: last finite value"
# Marks of points, in the order of the legend: marker and words.
MARKS = {
    "saturated": ("o", "saturated: above 0.3 of unrelated states"),
    SOME_DIVERGED: ("o", "some seeds diverged: mean of the others"),
    "diverged": (DIVERGED_MARKER, "diverged"),
    ALL_DIVERGED: (DIVERGED_MARKER, ALL_DIVERGED),
}
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

    def __init__(self, runs: Sequence[Run], options: Options) -> None:
        self.runs, self.options, self.table = runs, options, Table()
        self.series, self.depth_settings = split_series(runs)
        self.panels: list[Panel] = []
        self.levels: dict[tuple[str, Any], set[float]] = {}
        self.marks: set[str] = set()
        self.seeds: set[int] = set()
        self.published: dict[str, Line2D] = {}

    @cached_property
    def styles(self) -> list[dict[str, Any]]:
        """Colour, line and marker of each series: those that it has among all runs of the folder.

        A chart that can show some of the runs only gives none of them another's colour.
        """
        every = split_series(self.options.runs)[0]
        home = {run: i for i, s in enumerate(every) for run in s.runs}
        places = [home.get(s.runs[0], -1) for s in self.series]
        if -1 in places or len(set(places)) < len(places):  # here something else tells them apart
            every, places = self.series, list(range(len(self.series)))
        return [line_style(i, len(every), is_ordered(every)) for i in places]

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
        self.page = Page(math.ceil(count / across), across, panels=count, height=high)
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

    def finish(self, title: str, notes: Sequence[str], handles: Sequence[Handle] = ()) -> Chart:
        """Return the chart with legend and caption: `notes`, then the settings of the runs."""
        drawn = {r.get("panel") for r in self.table.rows if r["kind"] not in ("level", "reference")}
        for panel in self.panels:
            if (panel.name or None) not in drawn:
                style: Any = {"color": GREY, "ha": "center", "transform": panel.axes.transAxes}
                panel.axes.text(0.5, 0.5, "no value", **style)
        caption = [*notes, *caption_of(self.runs, self.depth_settings)]
        subtitle = title_of(self.runs, self.series)
        figure = self.page.finish(title, subtitle, caption, [*handles, *self._explanations()])
        return Chart(figure, self.table.frame(), title)

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
            label = f"± 1 standard deviation, {note}"
            entries.append(Patch(color=GREY, alpha=0.3, lw=0, label=label))
        return entries + list(self.published.values())


def lines(
    panel: Panel,
    series: str,
    rows: pd.DataFrame,
    *,
    kind: str = "line",
    band: bool = True,
    ends: bool = True,
    **style: Any,
) -> None:
    """Draw rows (x, y; with a band low, high, n; mark) as one line, and add them to the table.

    ends: whether a line of diverged runs ends in a hollow mark.  style: keywords of `plot`.
    """
    if rows.empty:
        return
    if len(rows) == 1 and "marker" not in style:  # one point has no line
        style |= {"marker": "o", "ms": 3}
    panel.axes.plot(rows["x"], rows["y"], **style)
    if band and "low" in rows:
        draw_band(panel, rows, style["color"])
    elif "low" in rows:
        rows = rows.assign(low=math.nan, high=math.nan)
    if ends and "mark" in rows and rows["mark"].iloc[-1] == "diverged":
        x, y = rows[["x", "y"]].to_numpy(float)[-1]
        end: Any = {"marker": DIVERGED_MARKER, "mfc": "white", "ms": 5, "color": style["color"]}
        panel.axes.plot(x, y, ls="none", zorder=4, **end)
        panel.drawing.marks.add("diverged")
    panel.add(rows, series=series, kind=kind)


def points(panel: Panel, series: str, rows: pd.DataFrame, style: dict[str, Any]) -> None:
    """Draw rows as points on a line with its band, and add them to the table."""
    draw_points(panel, rows, style)
    panel.add(rows, series=series, kind="point")


def draw_points(panel: Panel, rows: pd.DataFrame, style: dict[str, Any]) -> None:
    """Draw points on a line with its band: marked ones hollow, diverged ones alone."""
    joined = rows[rows["mark"] != "diverged"]
    panel.axes.plot(joined["x"], joined["y"], color=style["color"], ls=style["linestyle"])
    draw_band(panel, joined, style["color"])
    for x, y, mark in zip(rows["x"], rows["y"], rows["mark"], strict=True):
        gone = mark == "diverged"
        face = "white" if mark else style["color"]
        marker, size = (DIVERGED_MARKER, 5.2) if gone else (style["marker"], None)
        shape: Any = {"marker": marker, "ms": size, "mfc": face, "color": style["color"]}
        panel.axes.plot(x, y, ls="none", zorder=3, **shape)
    panel.drawing.marks |= {ALL_DIVERGED if m == "diverged" else m for m in rows["mark"] if m}


def heat_map(panel: Panel, steps: np.ndarray, values: np.ndarray, scale: Normalize) -> QuadMesh:
    """Draw values (steps, layers) as cells, and add them to the table; those it hides are grey."""
    values = values.T
    depth, count = values.shape
    drawable = is_drawable(values, scale)
    # An image rather than thousands of paths in the SVG.
    mesh = panel.axes.pcolormesh(
        np.arange(count + 1) - 0.5,
        np.arange(depth + 1) + 0.5,
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
    step, layer = (grid.ravel() for grid in np.meshgrid(steps, np.arange(1, depth + 1)))
    panel.add(pd.DataFrame({"x": step, "y": layer, "value": values.ravel()}), kind="cell")
    return mesh


def is_drawable(values: np.ndarray, scale: Normalize) -> np.ndarray:
    """Return where values are finite, and on a logarithmic scale above 0."""
    return np.isfinite(values) & ((values > 0) | (type(scale) is Normalize))


def draw_band(panel: Panel, rows: pd.DataFrame, colour: Any) -> None:
    """The band between low and high where they are known; a bar where nothing beside it is."""
    x, low, high = rows[["x", "low", "high"]].to_numpy(float).T
    known = np.isfinite(low) & np.isfinite(high)
    panel.drawing.seeds |= set(rows["n"][known].astype(int))
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


def axis_label(runs: Sequence[Run], name: str, words: str) -> str:
    """`model update ‖ΔF‖`, `loss L (nats)`: words, and the symbol and unit that the runs state."""
    for run in runs:
        for section in ("columns", "layers"):
            entry = run.columns.get(section, {}).get(name)
            if isinstance(entry, dict):
                unit = f" ({entry['unit']})" if entry.get("unit") else ""
                return f"{words} {typeset(str(entry.get('symbol', '')))}".rstrip() + unit
    return words
