"""How far the function moved, against depth and step."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import draw_curves
from deepstack.plots.drawing import Drawing
from deepstack.plots.group import Group
from deepstack.plots.page import axis_label
from deepstack.plots.panel import Panel
from deepstack.plots.texts import typeset
from deepstack.records import Run
from deepstack.runs.fit import fit_points, is_power
from deepstack.runs.runs import Runs
from deepstack.runs.settings import depths_of, require
from deepstack.runs.statistics import (
    ceiling_of,
    distinct_levels,
    has_diverged_by,
    points_of,
    shared_step,
    unrelated_distance,
    update_column,
    value_at,
)


@chart("update_vs_depth", main=2)
def update_vs_depth(runs: Runs, *, options: Options) -> Chart:
    """Model update against depth at the first and at the last shared step, with exponents."""
    runs = runs.with_steps()
    depths = depths_of(runs)
    last, _ = shared_step({run: run.steps["step"].tolist() for run in runs}, options.at_step)
    column = update_column(runs)
    drawing = Drawing(runs, options)
    steps = sorted({1, last})
    cells = [(group, step) for group in drawing.groups() for step in steps]
    names = [": ".join(filter(None, [group.name, f"step {step}"])) for group, step in cells]
    height = 1.9 if len(cells) <= 2 else 1.4
    layout: Any = {"titles": names, "columns": len(steps), "height": height}
    is_curved = False
    for panel, (group, step) in drawing.arrange(cells, names, **layout):
        for s in group.series:
            value = partial(value_at, column=column, step=step)
            diverged_by = partial(has_diverged_by, step=step)
            rows = points_of(s.by_depth, value, partial(ceiling_of, column=column), diverged_by)
            style = drawing.styles[s]
            panel.points(s.label, drawing.above_zero(rows), style, entry=True)
            fit = fit_points(rows)
            if not is_power(rows, fit):
                fit, is_curved = None, True
            panel.add_fit(s.label, fit, f"step {step}")
        draw_unrelated(panel, group, column)
    drawing.depth_axes(depths)
    require(not drawing.rows("point").empty, f"no run has a finite update above 0 at step {last}")
    drawing.value_axis(update_label(runs, column), drawing.panels, log=True)
    drawing.define("hollow points are left out of the fits", when=drawing.legend.marks)
    curved = "no exponent where means lie further from a power of N than seeds from their mean"
    drawing.define(curved, when=is_curved)
    if options.at_step is None and last != max(int(r.steps["step"].iloc[-1]) for r in runs):
        drawing.note(f"step {last} is the last one that all undiverged runs share")
    return drawing.finish("Model update against depth")


@chart("update_vs_step", main=6)
def update_vs_step(runs: Runs, *, options: Options) -> Chart:
    """Model update against the step, from the first step on."""
    runs = runs.with_steps()
    column = update_column(runs)
    return draw_curves(
        runs,
        column,
        title="Model update against step",
        y_label=update_label(runs, column),
        options=options,
        prepare=partial(draw_unrelated, column=column),
    )


def update_label(runs: Sequence[Run], column: str) -> str:
    """Return the label of the axis, which says whether it is ‖ΔF‖ or ‖ΔF‖/‖F_0‖."""
    label = axis_label(runs, column, "model update")
    symbol = "‖ΔF‖" if column == "model_update" else "‖ΔF‖/‖F_0‖"
    return label if "‖" in label else f"model update {typeset(symbol)}"


def draw_unrelated(panel: Panel, group: Group, column: str) -> None:
    """Draw the distances of unrelated states in this panel if they are at most three."""
    words = typeset("√2·‖F_0‖") if column == "model_update" else "√2"
    distances = sorted(unrelated_distance(run, column) for run in group.runs)
    levels = distinct_levels(distances, most=4)
    for value in levels if len(levels) <= 3 else ():
        panel.level(value, "unrelated states", f"unrelated states, {words}")
