"""Curves over steps: a panel a series, depths as shades, seeds as bands."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from deepstack.base.text import counted
from deepstack.plots.chart import Chart, Options
from deepstack.plots.drawing import Drawing
from deepstack.plots.group import Group
from deepstack.plots.panel import Panel
from deepstack.plots.style import GREY, is_wide, step_axis
from deepstack.records import Run
from deepstack.runs.runs import Runs
from deepstack.runs.settings import LR, require
from deepstack.runs.statistics import has_diverged
from deepstack.runs.tidy import seed_statistics, tidy

MOST_POINTS = 2000
MARGIN = 0.25  # of the range of values, above the start of a limited view
BEST_RATES = "each setting and depth at its best learning rate; --best none shows all"
SMOOTH_PARTS = 20  # noisy curves, if there are several, are means over this part of all steps

Source = str | Callable[[Run], pd.DataFrame]


class Overlay(NamedTuple):
    """A second column that is drawn over the curves: its kind in the table, name and style."""

    column: str
    source: Source
    kind: str
    name: str
    style: dict[str, Any]


def curve_rows(group: Group, column: str, source: Source = "steps") -> pd.DataFrame:
    """Return `seed_statistics` of the curves of a panel, by `line` (index of its series), depth.

    A curve is the mean of the seeds of one series at one depth that did not diverge, or one that
    did; `mark` tells.
    """
    tables: list[pd.DataFrame] = []
    for i, s in enumerate(group.series):
        for depth in group.depths:
            members = s.at(depth)
            undiverged = [run for run in members if not has_diverged(run)]
            for runs in (undiverged, *([run] for run in members if has_diverged(run))):
                rows = seed_statistics(tidy(runs, column, source, settings=()))
                mark = "diverged" if runs is not undiverged else None
                tables.append(rows.assign(line=i, depth=depth, curve=len(tables), mark=mark))
    return pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)


def draw_group(
    drawing: Drawing,
    panel: Panel,
    group: Group,
    rows: pd.DataFrame,
    markers: bool = False,
    **style: Any,
) -> None:
    """Draw each curve of these rows.  markers: whether curves in an uncrowded panel have them."""
    for _, curve in rows.groupby("curve"):
        line, depth = map(int, curve[["line", "depth"]].iloc[0])
        s = group.series[line]
        look = drawing.curve_style(s, depth, group.curves)
        look |= {"marker": drawing.style(s, depth)["marker"]} if markers else {}
        look["lw"] = 0.6 if curve["mark"].iloc[0] == "diverged" else 1.0
        look["place"] = line * len(group.depths) + group.depths.index(depth), group.curves
        name = f"{s.label}, N = {depth}" if len(drawing.depths) > 1 else s.label
        panel.lines(name, curve, **look | style)


def smoothed(rows: pd.DataFrame, width: int) -> pd.DataFrame:
    """Return the curves with running means over `width` rows, centred, fewer at the ends.

    width: 0 for a part of each curve (`part_of`).
    """
    if width == 1 or rows.empty:
        return rows
    names = ["y", "low", "high"]
    means = pd.concat(
        curve[names].rolling(width or part_of(curve), center=True, min_periods=1).mean()
        for _, curve in rows.groupby("curve", sort=False)
    )
    return rows.assign(**{name: means[name] for name in names})


def part_of(curve: pd.DataFrame) -> int:
    """Return the number of rows over which a curve is averaged that would hide others."""
    return max(1, len(curve) // SMOOTH_PARTS)


def thinned(rows: pd.DataFrame, stride: int) -> pd.DataFrame:
    """Return one row in `stride` of each curve, and its last."""
    curves = rows.groupby("curve")
    return rows[(curves.cumcount() % stride == 0) | (curves.cumcount(ascending=False) == 0)]


def top_near_start(tables: Sequence[pd.DataFrame]) -> float:
    """Return the upper end of a view near the first values, infinite if no curve leaves it.

    It lies above the highest first value by MARGIN of the distance down to the least value.
    """
    starts = pd.concat([rows.groupby("curve")["y"].first() for rows in tables if len(rows)])
    values = pd.concat(tables)["y"]
    start = float(starts.max())
    top = start + MARGIN * (start - float(values.min()))
    return top if (values > top).any() else math.inf


def mark_leaving(
    drawing: Drawing, panel: Panel, group: Group, rows: pd.DataFrame, top: float
) -> int:
    """Mark where the curves of a panel leave the view through its top; return their number."""
    leaving = rows[rows["y"] > top].groupby("curve").first()
    for _, row in leaving.iterrows():
        s = group.series[int(row["line"])]
        colour = drawing.curve_style(s, int(row["depth"]), group.curves)["color"]
        style: Any = {"marker": "^", "ms": 5, "ls": "none", "clip_on": False, "zorder": 5}
        panel.axes.plot(row["x"], panel.axes.get_ylim()[1], color=colour, **style)
        drawing.entry("leaves the view", marker="^", ls="none", color=GREY)
    return len(leaving)


def mark_all_leaving(
    drawing: Drawing, groups: Sequence[Group], tables: Sequence[pd.DataFrame], top: float
) -> None:
    """Mark in each panel where curves leave the view, and note how many do."""
    left = sum(
        mark_leaving(drawing, panel, group, rows, top)
        for panel, group, rows in zip(drawing.panels, groups, tables, strict=True)
    )
    words = "leave the view, which ends near the start" if left > 1 else "leaves the view"
    drawing.note(f"{counted('{} curves', left)} {words}", when=left)


def shows_all_rates(runs: Runs, options: Options) -> bool:
    """Return whether the user asks for every learning rate, or for a panel for each."""
    return options.rates == "all" or (
        options.panels is not None and runs.key(options.panels, "panels") == LR
    )


def draw_overlay(
    drawing: Drawing, panel: Panel, group: Group, overlay: Overlay, first_step: int
) -> None:
    """Draw another column beside the curves of a panel."""
    rows = curve_rows(group, overlay.column, overlay.source)
    is_level = overlay.kind == "level"
    style: Any = {"kind": overlay.kind, "band": not is_level, "ends": False} | overlay.style
    draw_group(drawing, panel, group, rows[rows["x"] >= first_step], **style)


def draw_curves(
    runs: Runs,
    column: str,
    *notes: str,
    title: str,
    y_label: str,
    options: Options,
    prepare: Callable[[Panel, Group], None] = lambda panel, group: None,
    source: Source = "steps",
    kind: str = "line",
    first_step: int = 1,
    name: str = "",
    noisy: bool = False,
    near_start: bool = False,
    overlays: Sequence[Overlay] = (),
) -> Chart:
    """Draw one column of steps.csv, or of another source, against the step.

    kind: of its rows in the table.
    name: of the column in the legend, if there are overlays.
    noisy: whether several curves are smoothed.
    near_start: whether the view ends a little above the highest first value; a mark at the upper
        edge shows where a curve leaves it.
    prepare: a function that draws the levels of a panel.
    notes: of the caption.
    """
    shown = runs if shows_all_rates(runs, options) else runs.at_best_rates
    drawing = Drawing(shown, options)
    drawing.note(BEST_RATES, when=len(shown) < len(runs))
    groups = drawing.groups("curves")
    tables = [curve_rows(group, column, source) for group in groups]
    steps = pd.concat(tables)["x"]
    require((steps >= first_step).any(), f"no run has a finite value of {column} after a step")
    most = max(len(drawing.series), *(group.curves for group in groups))
    width = 0 if noisy and most > 1 and options.smooth <= 1 else options.smooth
    curves = [curve for rows in tables for _, curve in rows.groupby("curve")]
    widths = sorted({width or part_of(curve) for curve in curves})
    tables = [smoothed(rows[rows["x"] >= first_step], width) for rows in tables]
    stride = max(
        math.ceil(rows.groupby("curve").size().max() / MOST_POINTS) for rows in tables if len(rows)
    )
    every = pd.concat(tables, ignore_index=True)
    top = top_near_start(tables) if near_start and options.y_scale is None else math.inf
    log = is_wide(every["y"].clip(upper=top)) and options.y_scale != "lin"
    if len(shown) > 1:
        drawing.explain(groups, max(group.curves for group in groups))
    if name:
        drawing.entry(name, color=GREY)
    for overlay in overlays:
        drawing.entry(overlay.name, **{"color": GREY} | overlay.style)
    contents = zip(groups, tables, strict=True)
    for panel, (group, rows) in drawing.arrange(contents, [group.name for group in groups]):
        prepare(panel, group)
        step_axis(panel.axes, first_step, int(steps.max()))  # its scale places error bars
        drawable = drawing.above_zero(rows) if log else rows
        draw_group(drawing, panel, group, thinned(drawable, stride), kind=kind)
        for overlay in overlays:
            draw_overlay(drawing, panel, group, overlay, first_step)
    drawing.value_axis(y_label, drawing.panels, log=log, most=top)
    mark_all_leaving(drawing, groups, tables, top)
    drawing.step_axes()
    every_width = " to ".join(map(str, sorted({widths[0], widths[-1]})))
    drawing.note(f"mean over {every_width} rows", when=widths[-1] > 1)
    drawing.note(f"one step in {stride} is drawn", when=stride > 1)
    return drawing.finish(title, *notes)
