"""Curves over steps: a panel a series, or one for all, depths as shades, seeds as bands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from deepstack.analysis.settings import Series, choose_series, evenly_spaced
from deepstack.analysis.statistics import has_diverged
from deepstack.analysis.tidy import seed_statistics, tidy
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options
from deepstack.plots.drawing import Drawing, Panel, lines, published
from deepstack.plots.page import Handle
from deepstack.plots.style import shade, step_axis
from deepstack.records import Run

MOST_PANELS = 12
FEW_SERIES = 4
MOST_ENTRIES = 12
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
    shades and series panels, or, of many series and few depths, the other way round.
    """

    def __init__(self, drawing: Drawing) -> None:
        self.drawing, self.series = drawing, drawing.series
        self.depths = sorted({depth for s in self.series for depth in s.depths})
        few = len(self.series) <= max(FEW_SERIES, len(self.depths))
        self.by_depth = len(self.depths) > 1 and few

    def panels(self, most: int) -> tuple[list[CurvePanel], list[str]]:
        """Return at most `most` panels, and notes on what has none."""
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

    def label(self, line: int, depth: int) -> str:
        """The name of a curve in the table."""
        name = self.series[line].label
        return f"{name}, N = {depth}" if len(self.depths) > 1 else name

    def handles(self, rows: pd.DataFrame) -> tuple[list[Handle], list[str]]:
        """Return one legend entry a colour of these rows, a dozen at most, and a note on others."""
        by = "depth" if self.by_depth else "line"
        names = {n: f"N = {n}" for n in self.depths}
        if not self.by_depth:
            names = {i: s.label for i, s in enumerate(self.series)}
        first = rows.drop_duplicates(by).sort_values(by)[["line", "depth", by]]
        handles: list[Handle] = [
            Line2D([], [], **self.style(line, depth), label=names[key])
            for line, depth, key in evenly_spaced(first.to_numpy(int).tolist(), MOST_ENTRIES)
        ]
        more = len(names) > MOST_ENTRIES
        return handles, [f"the legend names {MOST_ENTRIES} of {len(names)} lines"] if more else []

    def draw(self, panel: Panel, rows: pd.DataFrame, **style: Any) -> int:
        """Draw each curve of these rows, and return the largest stride of drawn steps."""
        stride = 1
        for _, curve in rows.groupby(["line", "depth", "curve"]):
            line, depth = map(int, curve[["line", "depth"]].iloc[0])
            every = max(math.ceil(len(curve) / MOST_POINTS), 1)
            stride = max(stride, every)
            last = curve.iloc[-1:] if (len(curve) - 1) % every else curve[:0]
            width = 0.6 if curve["mark"].iloc[0] == "diverged" else 1.0
            look = {"lw": width} | self.style(line, depth) | style
            drawn = pd.concat([curve[::every], last]) if len(last) else curve[::every]
            lines(panel, self.label(line, depth), drawn, **look)
        return stride


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
    log = bool((rows["y"] > 0).any() and (rows["y"] >= 0).all())
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
    if stride > 1:
        notes.append(f"one step in {stride} is drawn")
    return drawing.finish(title, notes, entries if len(runs) > 1 else [])
