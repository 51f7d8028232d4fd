"""Curves over steps: a panel a series, or one for all, depths as shades, seeds as bands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from deepstack.analysis.settings import (
    DEPTH,
    Series,
    choose_series,
    evenly_spaced,
    find_key,
)
from deepstack.analysis.statistics import has_diverged
from deepstack.analysis.tidy import seed_statistics, tidy
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options
from deepstack.plots.drawing import MOST_BANDS, Drawing, Panel, lines, published
from deepstack.plots.page import Handle
from deepstack.plots.style import shade, step_axis
from deepstack.records import Run

MOST_PANELS = 12
FEW_SERIES = 4
MOST_ENTRIES = 60
BARS = 6  # error bars of a curve
MOST_POINTS = 2000

# Name of a panel of curves (None for an only one), query of its rows, and its runs.
CurvePanel = tuple[str | None, str, Sequence[Run]]
Source = str | Callable[[Run], pd.DataFrame]


def curve_rows(series: Sequence[Series], column: str, source: Source = "steps") -> pd.DataFrame:
    """Return `seed_statistics` of every curve, by `line` (index of its series), depth and curve.

    A curve is the mean of the seeds of one series at one depth that did not diverge, or one that
    did; `mark` tells.
    """
    tables: list[pd.DataFrame] = []
    for i, s in enumerate(series):
        for depth in s.depths:
            members = s.at(depth)
            undiverged = [run for run in members if not has_diverged(run)]
            for runs in (undiverged, *([run] for run in members if has_diverged(run))):
                rows = seed_statistics(tidy(runs, column, source, settings=()))
                mark = "diverged" if runs is not undiverged else None
                tables.append(rows.assign(line=i, depth=depth, curve=len(tables), mark=mark))
    return pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)


class Arrangement:
    """How curves share panels and colours.

    Where depth and something else vary, the one with fewer values makes the panels: depths are
    shades and series panels, or, of many series and few depths, the other way round.  Many series
    of several settings have a panel for each scheme and depth, if these are few enough.  The user
    may name the setting of the panels.  multiples: whether more series than have bands in one panel
    get one panel each, if all of them fit.
    """

    def __init__(self, drawing: Drawing, multiples: bool = False) -> None:
        self.drawing, self.series = drawing, drawing.series
        self.depths = sorted({depth for s in self.series for depth in s.depths})
        few = len(self.series) <= max(FEW_SERIES, len(self.depths))
        self.multiples = multiples and MOST_BANDS < len(self.series) <= MOST_PANELS
        self.by_depth = len(self.depths) > 1 and (few or self.multiples)
        self.groups: list[tuple[str, list[int]]] = []
        chosen = drawing.options.panels
        if chosen is not None and find_key(chosen, drawing.runs) == DEPTH:
            self.by_depth = False
        elif chosen is not None:
            self.groups = drawing.groups()
            self.by_depth = all(len(lines) == 1 for _, lines in self.groups) and self.by_depth
        elif not self.by_depth:
            self.groups = drawing.groups()

    def panels(self, most: int) -> tuple[list[CurvePanel], list[str]]:
        """Return at most `most` panels, and notes on series without a panel.

        Panels by scheme and depth may be MOST_PANELS.
        """
        most = self.drawing.limit(most)
        if len(self.groups) > 1 and not self.by_depth:
            panels: list[CurvePanel] = []
            for name, members in self.groups:
                for n in self.depths:
                    here = [run for i in members for run in self.series[i].at(n)]
                    label = f"{name}, N = {n}" if len(self.depths) > 1 else name
                    panels.append((label, f"line in {members} and depth == {n}", here))
            panels = [panel for panel in panels if panel[2]]
            if len(panels) <= MOST_PANELS or self.drawing.options.panels is not None:
                return panels, []
        if self.by_depth and len(self.series) > 1:
            chosen, notes = choose_series(self.series, most)
            places = [self.series.index(s) for s in chosen]
            return [(self.series[i].label, f"line == {i}", self.series[i].runs)
                    for i in places], notes  # fmt: skip
        if not self.by_depth and len(self.depths) > 1:
            shown = evenly_spaced(self.depths, most)
            left = 1 < len(shown) < len(self.depths)
            notes = [f"{len(shown)} of {len(self.depths)} depths are shown"] if left else []
            runs = {n: [run for s in self.series for run in s.at(n)] for n in shown}
            return [(f"N = {n}", f"depth == {n}", runs[n]) for n in shown], notes
        return [(None, "line >= 0", self.drawing.runs)], []

    def style(self, line: int, depth: int) -> dict[str, Any]:
        """Colour and line of a curve.  Dark for deep: deep runs are the subject of a study."""
        if self.by_depth:
            last = len(self.depths) - 1
            return {"color": shade(last - self.depths.index(depth), last + 1), "ls": "-"}
        style = self.drawing.styles[line]
        return {"color": style["color"], "ls": style["linestyle"]}

    def marker(self, line: int) -> str:
        """Return the marker of a curve; `None` if shades of depth tell the curves apart."""
        many = not self.by_depth and len(self.series) > MOST_BANDS
        return str(self.drawing.styles[line]["marker"]) if many else "None"

    def label(self, line: int, depth: int) -> str:
        """The name of a curve in the table."""
        name = self.series[line].label
        return f"{name}, N = {depth}" if len(self.depths) > 1 else name

    def handles(self, rows: pd.DataFrame) -> tuple[list[Handle], list[str]]:
        """Return one legend entry a colour of these rows, at most MOST_ENTRIES, and a note."""
        by = "depth" if self.by_depth else "line"
        names = {n: f"N = {n}" for n in self.depths}
        if not self.by_depth:
            names = {i: s.label for i, s in enumerate(self.series)}
        first = rows.drop_duplicates(by).sort_values(by)[["line", "depth", by]]
        handles: list[Handle] = [
            Line2D([], [], **self.style(line, depth), label=names[key], marker=self.marker(line))
            for line, depth, key in evenly_spaced(first.to_numpy(int).tolist(), MOST_ENTRIES)
        ]
        more = len(names) > MOST_ENTRIES
        return handles, [f"the legend names {MOST_ENTRIES} of {len(names)} lines"] if more else []

    def draw(self, panel: Panel, rows: pd.DataFrame, *, log: bool = True, **style: Any) -> int:
        """Draw each curve of these rows, and return the largest stride of drawn steps.

        log: whether error bars are evenly spaced in the logarithm of the step.
        """
        stride = 1
        count = rows[["line", "depth"]].drop_duplicates().shape[0]
        for _, curve in rows.groupby(["line", "depth", "curve"]):
            line, depth = map(int, curve[["line", "depth"]].iloc[0])
            every = max(math.ceil(len(curve) / MOST_POINTS), 1)
            stride = max(stride, every)
            last = curve.iloc[-1:] if (len(curve) - 1) % every else curve[:0]
            width = 0.6 if curve["mark"].iloc[0] == "diverged" else 1.0
            look = {"lw": width} | self.style(line, depth) | style
            drawn = pd.concat([curve[::every], last]) if len(last) else curve[::every]
            bars = None
            if count > MOST_BANDS:
                bars = bar_rows(drawn["x"].to_numpy(float), line / len(self.series), log)
                marker = look.get("marker") if self.by_depth else self.marker(line)
                look |= {"marker": marker, "ms": 3, "markevery": bars}
            lines(panel, self.label(line, depth), drawn, bars=bars, **look)
        return stride


def bar_rows(x: np.ndarray, shift: float, log: bool = True) -> list[int]:
    """Return the rows of a curve that have error bars, evenly spaced in x or log x.

    shift: 0 to 1, which sets the bars of one curve beside those of another.
    """
    if len(x) <= BARS:
        return list(range(len(x)))
    at = np.log(x) if log and x[0] > 0 else x
    places = at[0] + (at[-1] - at[0]) * (np.arange(BARS) + shift) / BARS
    return sorted({int(np.abs(at - target).argmin()) for target in places})


def smoothed(rows: pd.DataFrame, width: int) -> pd.DataFrame:
    """Return the curves with running means over `width` rows, centred, fewer at the ends."""
    if width <= 1 or rows.empty:
        return rows
    values = rows.groupby("curve")[["y", "low", "high"]]
    means = values.rolling(width, center=True, min_periods=1).mean().droplevel(0)
    return rows.assign(**{name: means[name] for name in ("y", "low", "high")})


def draw_curves(
    runs: list[Run],
    column: str,
    *,
    title: str,
    y_label: str,
    options: Options,
    prepare: Callable[[Panel], None] = lambda panel: None,
    source: Source = "steps",
) -> Chart:
    """One column of steps.csv, or of another source, against the step.

    Both axes are logarithmic; that of values is plain where some are negative or none is positive.
    """
    drawing = Drawing(runs, options)
    arrangement = Arrangement(drawing)
    panels, notes = arrangement.panels(MOST_PANELS)
    rows = curve_rows(drawing.series, column, source).query("x > 0")
    rows = rows.query(" or ".join(f"({query})" for _, query, _ in panels))
    rows = smoothed(rows, options.smooth)
    log = bool((rows["y"] > 0).any() and (rows["y"] >= 0).all()) and options.y_scale != "lin"
    drawable = rows[rows["y"] > 0] if log else rows
    shown = {name: part for name, q, _ in panels if len(part := drawable.query(q))}
    if not shown:
        raise NothingMatchedError(f"no run has a finite value of {column} after a step")
    stride = 1
    for panel in drawing.add_panels(list(shown)):
        prepare(panel)
        stride = max(stride, arrangement.draw(panel, shown[panel.name]))
        published(panel)
    steps = drawing.rows()["x"]
    drawing.value_axis(y_label, drawing.panels, log=log)
    for panel in drawing.panels:
        step_axis(panel.axes, int(steps.min()), int(steps.max()))
    entries, more = arrangement.handles(drawable)
    notes += more
    if lost := [str(name) for name, _, _ in panels if name not in shown]:
        notes.append(f"no finite value{' above 0' if log else ''} of {', '.join(lost)}")
    if len(drawable) < len(rows):
        notes.append("zeros are not drawn")
    if options.smooth > 1:
        notes.append(f"mean over {options.smooth} rows")
    if stride > 1:
        notes.append(f"one step in {stride} is drawn")
    return drawing.finish(title, notes, entries if len(runs) > 1 else [])
