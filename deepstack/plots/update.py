"""How far the function moved: against depth, with a fitted exponent, and against the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.lines import Line2D

from deepstack.analysis.captions import caption_of, title_of
from deepstack.analysis.fit import Fit, exponent_title, fit_points
from deepstack.analysis.series import Series, split_series
from deepstack.analysis.settings import depth_of
from deepstack.analysis.statistics import (
    SATURATED,
    has_diverged,
    has_diverged_by,
    points_of,
    shared_steps,
    unrelated_distance,
    update_column,
    value_at,
    with_steps,
)
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, Table, chart
from deepstack.plots.curves import Panel, draw_curves
from deepstack.plots.page import Handle, Page
from deepstack.plots.style import depth_axis, log_axis
from deepstack.plots.values import (
    ALL_DIVERGED,
    DASHED,
    add_points,
    axis_label,
    deviation_handle,
    draw_level,
    draw_points,
    draw_reference,
    line_styles,
    log_extent,
    mark_handles,
    write_no_value,
)
from deepstack.records import Run


@chart("update_vs_depth")
def update_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """Model update against depth at the first and at the last shared step, with exponents."""
    runs = with_steps(runs)
    depths = sorted({depth_of(run) for run in runs})
    if len(depths) < 2:
        raise NothingMatchedError(f"needs runs of two depths or more; all have N = {depths[0]}")
    shared = shared_steps([run for run in runs if not has_diverged(run)] or runs)
    if options.at_step is not None and not any(
        options.at_step in run.steps["step"].to_numpy() for run in runs
    ):
        raise NothingMatchedError(f"no run has a row for step {options.at_step}")
    if options.at_step is None and not shared:
        raise NothingMatchedError("the runs share no step")
    last = shared[-1] if options.at_step is None else options.at_step
    steps = sorted({1, last})
    series, depth_settings = split_series(runs)
    column = update_column(runs)
    lines = [
        [
            points_of(
                s.depths,
                s.at,
                partial(value_at, column=column, step=step),
                lambda run: SATURATED * unrelated_distance(run, column),
                partial(has_diverged_by, step=step),
            )
            for s in series
        ]
        for step in steps
    ]
    styles = line_styles(series, options.runs)
    table = Table()
    page = Page(1, len(steps), height=1.9)
    levels = _distinct([unrelated_distance(run, column) for run in runs])
    published: list[Handle] = []
    for i, (axes, step) in enumerate(zip(page.axes, steps, strict=True)):
        panel = f"step {step}"
        axes.set_title(panel)
        fits = [fit_points(points) for points in lines[i]]
        for level in levels:
            draw_level(axes, level, "unrelated states", panel, table)
        for s, points, fit, style in zip(series, lines[i], fits, styles, strict=True):
            drawable = [p for p in points if p.value.mean > 0]
            draw_points(axes, drawable, style)
            add_points(table, panel, s.label, drawable, fit)
        if not any(row["kind"] == "point" and row["panel"] == panel for row in table.rows):
            write_no_value(axes)
        published = draw_reference(axes, options, "update_vs_depth", table, panel) or published
        depth_axis(axes, depths)
        page.legend_below(i, _entries(series, fits, styles), exponent_title(fits))
    if not any(row["kind"] == "point" for row in table.rows):
        raise NothingMatchedError(f"no run has a finite update above 0 at step {last}")
    for axes in page.axes:
        log_axis(axes, "y", *log_extent(table.rows))
        axes.set_ylabel(axis_label(runs, column, "model update"))
    if len(page.axes) > 1:
        page.outer_labels_only()
    counts = [p.value.n for row in lines for points in row for p in points]
    handles = _level_handle(levels, column)
    marks = {p.mark for row in lines for points in row for p in points}
    handles += mark_handles(marks, "saturated: above 0.3 of it", ALL_DIVERGED)
    handles += deviation_handle(counts)
    notes = caption_of(runs, depth_settings)
    if any(marks):
        notes.append("hollow points are left out of the fits")
    if any(p.value.mean == 0 for row in lines for points in row for p in points):
        notes.append("zeros are not drawn")
    if options.at_step is None and last != max(int(r.steps["step"].iloc[-1]) for r in runs):
        but = ", but for those that diverged" if any(map(has_diverged, runs)) else ""
        notes.append(f"step {last} is the last one that all runs share{but}")
    title = "Model update against depth"
    figure = page.finish(title, title_of(runs, series), notes, handles + published)
    return Chart(figure, table.frame(), title)


@chart("update_vs_step")
def update_vs_step(runs: list[Run], *, options: Options) -> Chart:
    """Model update against the step, from the first step on."""
    runs = with_steps(runs)
    column = update_column(runs)
    levels = _distinct([unrelated_distance(run, column) for run in runs])

    def prepare(panel: Panel) -> None:
        for level in levels:
            draw_level(panel.axes, level, "unrelated states", panel.name, panel.table)

    return draw_curves(
        runs,
        column,
        chart="update_vs_step",
        title="Model update against step",
        y_label=axis_label(runs, column, "model update"),
        options=options,
        prepare=prepare,
        handles=_level_handle(levels, column),
    )


def _level_handle(levels: Sequence[float], column: str) -> list[Handle]:
    """Return the legend entry of the distance of unrelated states, if there is one."""
    words = "√2·‖F$_0$‖" if column == "model_update" else "√2"
    return [Line2D([], [], **DASHED, label=f"unrelated states, {words}")] if levels else []


def _entries(
    series: Sequence[Series], fits: Sequence[Fit | None], styles: Sequence[dict[str, Any]]
) -> list[Handle]:
    """One legend entry a series: its name and its exponent in this panel."""
    entries: list[Handle] = []
    for s, fit, style in zip(series, fits, styles, strict=True):
        entries.append(Line2D([], [], **style, label=f"{s.label}: {fit or 'no fit'}"))
    return entries


def _distinct(values: Sequence[float]) -> list[float]:
    """Finite levels that differ by more than two percent, three at most."""
    distinct: list[float] = []
    for value in sorted(v for v in values if math.isfinite(v)):
        if not distinct or value / distinct[-1] > 1.02:
            distinct.append(value)
    return distinct[:3]
