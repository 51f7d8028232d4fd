"""Curves over steps: a panel a series, or one for all, depths as shades, seeds as bands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from deepstack.analysis.selection import find_key
from deepstack.analysis.settings import DEPTH, Series, choose_series, evenly_spaced
from deepstack.analysis.statistics import has_diverged
from deepstack.analysis.tidy import seed_statistics, tidy
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.drawing import Drawing, axis_label
from deepstack.plots.panel import MOST_BANDS, Panel
from deepstack.plots.style import DASHES, GREY, shade
from deepstack.records import Run

MOST_PANELS = 12
FEW_SERIES = 4
MOST_ENTRIES = 60
BARS = 6  # error bars of a curve
MOST_POINTS = 2000
SHARPNESS, THRESHOLD = "preconditioned_sharpness", "stability_threshold"

Source = str | Callable[[Run], pd.DataFrame]


class CurvePanel(NamedTuple):
    """A panel of curves: its name (None for an only one), the query of its rows, and its runs."""

    name: str | None
    query: str
    runs: Sequence[Run]


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
        self.drawing, self.series, self.stride = drawing, drawing.series, 1
        self.depths = sorted({depth for s in self.series for depth in s.depths})
        few = len(self.series) <= max(FEW_SERIES, len(self.depths))
        self.multiples = multiples and MOST_BANDS < len(self.series) <= MOST_PANELS
        self.by_depth = len(self.depths) > 1 and (few or self.multiples)
        self.groups: list[tuple[str, list[Series]]] = []
        chosen = drawing.options.panels
        if chosen is not None and find_key(chosen, drawing.runs) == DEPTH:
            self.by_depth = False
        elif chosen is not None:
            self.groups = drawing.groups()
            self.by_depth = all(len(lines) == 1 for _, lines in self.groups) and self.by_depth
        elif not self.by_depth:
            self.groups = drawing.groups()

    def panels(self, most: int) -> list[CurvePanel]:
        """Return at most `most` panels; the caption names series without a panel.

        Panels by scheme and depth may be MOST_PANELS.
        """
        most, series, notes = self.drawing.limit(most), self.series, self.drawing.notes
        if len(self.groups) > 1 and not self.by_depth:
            cells = [(name, members, n) for name, members in self.groups for n in self.depths]
            panels = [
                CurvePanel(
                    f"{name}, N = {n}" if len(self.depths) > 1 else name,
                    f"line in {[series.index(s) for s in members]} and depth == {n}",
                    [run for s in members for run in s.at(n)],
                )
                for name, members, n in cells
            ]
            panels = [panel for panel in panels if panel.runs]
            if len(panels) <= MOST_PANELS or self.drawing.options.panels is not None:
                return panels
        if self.by_depth and len(series) > 1:
            chosen, left = choose_series(series, most)
            notes += left
            return [CurvePanel(s.label, f"line == {series.index(s)}", s.runs) for s in chosen]
        if not self.by_depth and len(self.depths) > 1:
            shown = evenly_spaced(self.depths, most)
            if 1 < len(shown) < len(self.depths):
                notes.append(f"{len(shown)} of {len(self.depths)} depths are shown")
            runs = {n: [run for s in series for run in s.at(n)] for n in shown}
            return [CurvePanel(f"N = {n}", f"depth == {n}", runs[n]) for n in shown]
        return [CurvePanel(None, "line >= 0", self.drawing.runs)]

    def style(self, line: int, depth: int) -> dict[str, Any]:
        """Colour and line of a curve.  Dark for deep: deep runs are the subject of a study."""
        if self.by_depth:
            last = len(self.depths) - 1
            return {"color": shade(last - self.depths.index(depth), last + 1), "ls": "-"}
        style = self.drawing.styles[self.series[line]]
        return {"color": style["color"], "ls": style["linestyle"]}

    def marker(self, line: int) -> str:
        """Return the marker of a curve; `None` if shades of depth tell the curves apart."""
        many = not self.by_depth and len(self.series) > MOST_BANDS
        return str(self.drawing.styles[self.series[line]]["marker"]) if many else "None"

    def label(self, line: int, depth: int) -> str:
        """The name of a curve in the table."""
        name = self.series[line].label
        return f"{name}, N = {depth}" if len(self.depths) > 1 else name

    def explain(self, rows: pd.DataFrame) -> None:
        """Add one legend entry a colour of these rows, at most MOST_ENTRIES."""
        by = "depth" if self.by_depth else "line"
        names = {n: f"N = {n}" for n in self.depths}
        if not self.by_depth:
            names = {i: s.label for i, s in enumerate(self.series)}
        first = rows.drop_duplicates(by).sort_values(by)[["line", "depth", by]]
        for line, depth, key in evenly_spaced(first.to_numpy(int).tolist(), MOST_ENTRIES):
            style = self.style(line, depth) | {"marker": self.marker(line)}
            self.drawing.entry(names[key], **style)
        if len(names) > MOST_ENTRIES:
            self.drawing.note(f"the legend names {MOST_ENTRIES} of {len(names)} lines")

    def draw(self, panel: Panel, rows: pd.DataFrame, *, log: bool = True, **style: Any) -> None:
        """Draw each curve of these rows, of long ones some rows: see `stride`.

        log: whether error bars are evenly spaced in the logarithm of the step.
        """
        count = rows[["line", "depth"]].drop_duplicates().shape[0]
        for _, curve in rows.groupby(["line", "depth", "curve"]):
            line, depth = map(int, curve[["line", "depth"]].iloc[0])
            every = max(math.ceil(len(curve) / MOST_POINTS), 1)
            self.stride = max(self.stride, every)
            width = 0.6 if curve["mark"].iloc[0] == "diverged" else 1.0
            look = {"lw": width} | self.style(line, depth) | style
            drawn = curve.iloc[sorted({*range(0, len(curve), every), len(curve) - 1})]
            bars = None
            if count > MOST_BANDS:
                bars = bar_rows(drawn["x"].to_numpy(float), line / len(self.series), log)
                marker = look.get("marker") if self.by_depth else self.marker(line)
                look |= {"marker": marker, "ms": 3, "markevery": bars}
            panel.lines(self.label(line, depth), drawn, bars=bars, **look)


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
    *notes: str,
    title: str,
    y_label: str,
    options: Options,
    prepare: Callable[[Panel], None] = lambda panel: None,
    source: Source = "steps",
    beside: str | None = None,
) -> Chart:
    """One column of steps.csv, or of another source, against the step.

    Both axes are logarithmic; that of values is plain where some are negative or none is positive.
    beside: a column that is drawn dashed.  notes: of the caption.
    """
    drawing = Drawing(runs, options)
    arrangement = Arrangement(drawing)
    panels = arrangement.panels(MOST_PANELS)
    rows = curve_rows(drawing.series, column, source).query("x > 0")
    rows = rows.query(" or ".join(f"({panel.query})" for panel in panels))
    rows = smoothed(rows, options.smooth)
    log = bool((rows["y"] > 0).any() and (rows["y"] >= 0).all()) and options.y_scale != "lin"
    drawable = rows[rows["y"] > 0] if log else rows
    shown = [panel for panel in panels if len(drawable.query(panel.query))]
    if not shown:
        raise NothingMatchedError(f"no run has a finite value of {column} after a step")
    others = curve_rows(drawing.series, beside, source) if beside else rows[:0]
    dashed: Any = {"ls": DASHES[1], "lw": 0.8}
    for panel, (_, query, _) in drawing.fill([one.name for one in shown], shown):
        prepare(panel)
        dashed_rows = others.query("x > 0").query(query)
        arrangement.draw(panel, dashed_rows, kind="level", band=False, ends=False, **dashed)
        arrangement.draw(panel, drawable.query(query))
    drawing.value_axis(y_label, drawing.panels, log=log)
    drawing.step_axes()
    if len(runs) > 1:
        arrangement.explain(drawable)
    if beside:
        drawing.entry(beside.replace("_", " "), color=GREY, **dashed)
    if lost := [str(panel.name) for panel in panels if panel not in shown]:
        drawing.note(f"no finite value{' above 0' if log else ''} of {', '.join(lost)}")
    drawing.note("zeros are not drawn", when=len(drawable) < len(rows))
    drawing.note(f"mean over {options.smooth} rows", when=options.smooth > 1)
    drawing.note(f"one step in {arrangement.stride} is drawn", when=arrangement.stride > 1)
    return drawing.finish(title, *notes)


@chart("sharpness_vs_step")
def sharpness_vs_step(runs: list[Run], *, options: Options) -> Chart:
    """Sharpness of the preconditioned loss against the step, and the optimizer's threshold."""
    measured = [run for run in runs if len(run.sharpness)]
    if not measured:
        raise NothingMatchedError("no run has a sharpness.csv (log.sharpness_every is 0?)")
    left = f"left out: {len(runs) - len(measured)} of {len(runs)} runs without log.sharpness_every"
    return draw_curves(
        measured,
        SHARPNESS,
        *([left] if len(measured) < len(runs) else []),
        title="Sharpness against step",
        y_label=axis_label(measured, SHARPNESS, "preconditioned sharpness"),
        options=options,
        source="sharpness",
        beside=THRESHOLD,
    )
