"""How far the function moved: against depth, with a fitted exponent, and against the step."""

from __future__ import annotations

import math
from functools import partial

from matplotlib.lines import Line2D

from deepstack.analysis.fit import exponent_title, fit_points
from deepstack.analysis.settings import depths_of
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
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import draw_curves
from deepstack.plots.drawing import Drawing, Panel, axis_label, level, points, published
from deepstack.plots.style import depth_axis
from deepstack.records import Run


@chart("update_vs_depth")
def update_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """Model update against depth at the first and at the last shared step, with exponents."""
    runs = with_steps(runs)
    depths = depths_of(runs)
    shared = shared_steps([run for run in runs if not has_diverged(run)] or runs)
    if options.at_step is None and not shared:
        raise NothingMatchedError("the runs share no step")
    last = shared[-1] if options.at_step is None else options.at_step
    if not any(last in run.steps["step"].to_numpy() for run in runs):
        raise NothingMatchedError(f"no run has a row for step {last}")
    column = update_column(runs)
    drawing, has_zeros = Drawing(runs, options), False
    steps = sorted({1, last})
    names = [f"step {step}" for step in steps]
    for panel, step in zip(drawing.add_panels(names, titles=names, height=1.9), steps, strict=True):
        draw_unrelated(panel, column)
        entries, fits = [], []
        for s, style in zip(drawing.series, drawing.styles, strict=True):
            value = partial(value_at, column=column, step=step)
            rows = points_of(
                s.by_depth,
                value,
                lambda run: SATURATED * unrelated_distance(run, column),
                partial(has_diverged_by, step=step),
            )
            fits.append(fit_points(rows))
            has_zeros |= bool((rows["y"] == 0).any())
            points(panel, s.label, rows[rows["y"] > 0], style)
            panel.add_fit(s.label, fits[-1])
            label = f"{s.label}: {fits[-1] or 'no fit'}"
            entries.append(Line2D([], [], **style, label=label))
        published(panel)
        depth_axis(panel.axes, depths)
        drawing.page.legend_below(steps.index(step), entries, exponent_title(fits))
    if drawing.rows("point").empty:
        raise NothingMatchedError(f"no run has a finite update above 0 at step {last}")
    drawing.value_axis(axis_label(runs, column, "model update"), drawing.panels)
    notes = ["hollow points are left out of the fits"] if drawing.marks else []
    notes += ["zeros are not drawn"] if has_zeros else []
    if options.at_step is None and last != max(int(r.steps["step"].iloc[-1]) for r in runs):
        but = ", but for those that diverged" if any(map(has_diverged, runs)) else ""
        notes.append(f"step {last} is the last one that all runs share{but}")
    return drawing.finish("Model update against depth", notes)


@chart("update_vs_step")
def update_vs_step(runs: list[Run], *, options: Options) -> Chart:
    """Model update against the step, from the first step on."""
    runs = with_steps(runs)
    column = update_column(runs)
    return draw_curves(
        runs,
        column,
        title="Model update against step",
        y_label=axis_label(runs, column, "model update"),
        options=options,
        prepare=partial(draw_unrelated, column=column),
    )


def draw_unrelated(panel: Panel, column: str) -> None:
    """Draw the distances of unrelated states that differ by over two percent, three at most."""
    words = "√2·‖F$_0$‖" if column == "model_update" else "√2"
    distinct: list[float] = []
    for value in sorted(unrelated_distance(run, column) for run in panel.drawing.runs):
        if math.isfinite(value) and (not distinct or value / distinct[-1] > 1.02):
            distinct.append(value)
    for value in distinct[:3]:
        level(panel, value, "unrelated states", f"unrelated states, {words}")
