"""Loss against step, depth and learning rate; the largest k solved against depth."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from deepstack.base.text import counted
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import Overlay, draw_curves
from deepstack.plots.drawing import Drawing
from deepstack.plots.group import Group
from deepstack.plots.page import axis_label
from deepstack.plots.panel import Panel
from deepstack.plots.style import DASHES, axis_number, shades, tried_axis
from deepstack.records import Run
from deepstack.runs.cells import runs_by_rate
from deepstack.runs.loss_text import context_free_loss, in_nats
from deepstack.runs.runs import Runs
from deepstack.runs.settings import LR, TASK, depths_of, require
from deepstack.runs.statistics import (
    differ_in_least_loss,
    final_value,
    has_diverged,
    least_loss,
    loss_column,
    mask_note,
    points_of,
    training_levels,
    validation_levels,
)

VALIDATION = "validation loss"
LEVELS: dict[str, tuple[str, Any]] = {
    "context_free": ("best without context", DASHES[1]),
    "training": ("training loss without context (expected)", DASHES[2]),
    "optimal_loss": ("Bayes optimum", "-"),
}


def draw_levels(panel: Panel, levels: list[tuple[str, float]]) -> None:
    """Draw horizontal lines to compare a loss with."""
    for name, value in dict.fromkeys(levels):
        series, dash = LEVELS[name]
        panel.level(value, series, series, dash)


def loss_label(runs: Sequence[Run]) -> str:
    """Return the label of the axis of the final validation loss."""
    return in_nats(runs, f"{VALIDATION}{mask_note(runs)}")


class LossScale(NamedTuple):
    """The scale of the final losses in a chart.

    value: loss of a run, minus its least possible loss where that differs between seeds: then
        differences between the seeds' chains are not part of the deviation.
    label: of the axis.
    levels: names and values of the reference levels of runs.
    """

    value: Callable[[Run], float]
    label: str
    levels: Callable[[Sequence[Run]], list[tuple[str, float]]]


def loss_scale(runs: Sequence[Run]) -> LossScale:
    """Return the scale of the final validation losses of runs."""
    column = loss_column(runs)
    if not differ_in_least_loss(runs):
        return LossScale(partial(final_value, column=column), loss_label(runs), validation_levels)

    def above(run: Run, loss: float | None) -> float:
        least = least_loss(run)
        return math.nan if loss is None or least is None else loss - least

    def levels(here: Sequence[Run]) -> list[tuple[str, float]]:
        distances = [above(run, context_free_loss(run, column)) for run in here]
        finite = [distance for distance in distances if math.isfinite(distance)]
        return [("context_free", float(np.mean(finite)))] if finite else []

    label = f"{VALIDATION}{mask_note(runs)} − Bayes optimum (nats)"
    return LossScale(lambda run: above(run, final_value(run, column)), label, levels)


@chart("loss_vs_step", main=5)
def loss_vs_step(runs: Runs, *, options: Options) -> Chart:
    """Training and validation loss against the step, with the levels that need no learning."""
    runs = runs.with_steps()
    circles: Any = {"ls": "none", "marker": "o", "mfc": "white", "ms": 3, "zorder": 4}
    name = VALIDATION + mask_note(runs)
    validation = Overlay(loss_column(runs), "evals", "validation", name, circles)
    has_evals = any(len(run.evals) for run in runs)

    def draw_all_levels(panel: Panel, group: Group) -> None:
        draw_levels(panel, training_levels(group.runs) + validation_levels(group.runs))

    return draw_curves(
        runs,
        "loss",
        title="Loss against step",
        y_label=in_nats(runs, "loss"),
        options=options,
        prepare=draw_all_levels,
        kind="training",
        name="training loss",
        first_step=0,
        noisy=True,
        near_start=True,
        overlays=[validation] if has_evals else [],
    )


@chart("final_loss_vs_depth", main=1)
def final_loss_vs_depth(runs: Runs, *, options: Options) -> Chart:
    """Validation loss at the end of training against depth, on [MASK] positions where there are.

    Each task has a separate panel, axis and levels, because losses of two tasks do not compare.
    """
    final = runs.evaluated()
    depths = depths_of(final, "finished runs")
    drawing = Drawing(final, options)
    tasks = dict.fromkeys(s.runs[0].get(TASK, "?") for s in drawing.series)
    of_task = {task: [run for run in final if run.get(TASK, "?") == task] for task in tasks}
    cells = []
    for task, here in of_task.items():
        for group in drawing.groups():
            name = ": ".join(filter(None, [f"task {task}" * (len(tasks) > 1), group.name]))
            lines = [s for s in group.series if s.runs[0] in here]
            cells += [(name, task, lines)] if lines else []
    layout: Any = {"height": 2.0 if len(cells) <= 2 else 1.5}
    scales = {task: loss_scale(here) for task, here in of_task.items()}
    for panel, (_, task, lines) in drawing.arrange(cells, [name for name, _, _ in cells], **layout):
        for s in lines:
            points = points_of(s.by_depth, scales[task].value)
            panel.points(s.label, points, drawing.styles[s], entry=True)
        draw_levels(panel, scales[task].levels(of_task[task]))
    drawing.depth_axes(depths)
    for task in of_task:
        same = [p for p, (_, of, _) in zip(drawing.panels, cells, strict=True) if of == task]
        drawing.value_axis(scales[task].label, same)
    require(not drawing.rows("point").empty, "no finished run has a finite validation loss")
    left = len(runs) - len(final)
    drawing.note(f"left out: {counted('{} unfinished runs', left)}", when=left)
    early = [run for run in final if math.isnan(final_value(run, loss_column([run])))]
    words = f"left out: {counted('{} runs', len(early))} that diverged before a second evaluation"
    drawing.note(words, when=early)
    return drawing.finish("Final validation loss against depth")


@chart("solved_vs_depth")
def solved_vs_depth(runs: Runs, *, options: Options) -> Chart:
    """The largest k that a stack solves against depth, for tasks whose answers take k steps."""
    measured = runs.keep(
        lambda run: "solved" in run.evals, "no run has a task with k steps (`hops`, `group`)"
    )
    final = measured.evaluated()
    depths = depths_of(final, "finished runs")
    drawing = Drawing(final, options)
    for panel, group in drawing.arrange(drawing.groups()):
        for s in group.series:
            rows = points_of(s.by_depth, partial(final_value, column="solved"))
            panel.points(s.label, rows, drawing.styles[s], entry=True)
    drawing.depth_axes(depths)
    label = axis_label(final, "solved", "largest k solved").removesuffix(" k")
    drawing.value_axis(label, drawing.panels, log=False, include=0.0)
    drawing.note("solved: every accuracy up to k is above 0.95")
    left = len(runs) - len(final)
    drawing.note(f"left out: {counted('{} runs', left)} unfinished or of other tasks", when=left)
    return drawing.finish("Largest k solved against depth")


def runs_of_rates(runs: Runs) -> Runs:
    """Return the finished runs.  Raises NothingMatchedError for fewer than two learning rates."""
    final = runs.evaluated()
    require(
        len({run.get(LR) for run in final}) > 1, "needs finished runs of two learning rates or more"
    )
    return final


@chart("loss_vs_lr", main=4)
def loss_vs_lr(runs: Runs, *, options: Options) -> Chart:
    """Final validation loss against the learning rate, a curve a depth, the best rate of each."""
    final = runs_of_rates(runs)
    drawing = Drawing(final, options, but=[LR])
    scale = loss_scale(final)
    curves = {cell: points_of(at, scale.value) for cell, at in runs_by_rate(drawing.series).items()}
    curves = {cell: rows[rows["mark"] != "diverged"] for cell, rows in curves.items()}
    shown = [s for s in drawing.series if any(len(curves[s, n]) for n in s.depths)]
    require(shown, "every run diverged, or has no finite validation loss")
    rates = {(one.label, one.depth): one.value for one in runs.bests() if one.is_chosen}
    groups = drawing.groups("series", series=shown)
    colours = shades(sorted({n for s in shown for n in s.depths}, reverse=True))
    for depth, colour in sorted(colours.items()):
        drawing.entry(f"N = {depth}", marker="o", color=colour)
    for panel, group in drawing.arrange(groups):
        (s,) = group.series
        for depth in s.depths:
            rows = curves[s, depth]
            style = {"marker": "o", "color": colours[depth], "linestyle": "-"}
            best = rows[(rows["mark"] == "") & (rows["x"] == rates.get((s.label, depth)))]
            kinds = np.where(rows.index.isin(best.index), "best", "point")
            panel.points(f"N = {depth}", rows.assign(kind=kinds), style)
            if len(best):
                panel.ring(best["x"], best["y"], "best", color=colours[depth])
        draw_levels(panel, scale.levels(s.runs))
    rows = drawing.rows("point", "best")
    drawing.value_axis(scale.label, drawing.panels)
    for panel in drawing.panels:
        tried_axis(panel.axes, rows["x"].tolist(), axis_number, "learning rate")
    diverged = sum(map(has_diverged, final))
    left = f"left out: {counted('{} diverged runs', diverged)}; best is among rates without one"
    drawing.note(left, when=diverged)
    unfinished = ", ".join(s.label for s in drawing.series if s not in shown)
    drawing.note(f"nothing finished of {unfinished}", when=unfinished)
    return drawing.finish("Final validation loss against learning rate")
