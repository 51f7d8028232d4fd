"""Loss against step, depth and learning rate; the best rate and the largest k solved by depth."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from deepstack.analysis.intervals import LEAST_SEEDS, NO_INTERVAL
from deepstack.analysis.settings import LR, TASK, depths_of, require
from deepstack.analysis.statistics import (
    evaluated_runs,
    final_value,
    has_diverged,
    loss_column,
    mask_note,
    points_of,
    training_levels,
    validation_levels,
    with_steps,
)
from deepstack.analysis.transfer import (
    PUBLISHED_LAWS,
    Losses,
    final_losses,
    mean_curve,
    runs_by_rate,
    shared_seeds,
    transfer,
)
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import Overlay, draw_curves
from deepstack.plots.drawing import Drawing
from deepstack.plots.group import Group
from deepstack.plots.page import axis_label
from deepstack.plots.panel import EDGE_RATE, Panel
from deepstack.plots.style import DASHES, GREY, number_axis, shades
from deepstack.plots.texts import typeset_power
from deepstack.records import Run
from deepstack.records.cells import counted

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


def loss_label(runs: list[Run]) -> str:
    """Return the label of the axis of the final validation loss."""
    return f"{VALIDATION}{mask_note(runs)} (nats)"


@chart("loss_vs_step")
def loss_vs_step(runs: list[Run], *, options: Options) -> Chart:
    """Training and validation loss against the step, with the levels that need no learning."""
    runs = with_steps(runs)
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
        y_label="loss (nats)",
        options=options,
        prepare=draw_all_levels,
        kind="training",
        name="training loss",
        first_step=0,
        noisy=True,
        overlays=[validation] if has_evals else [],
    )


@chart("final_loss_vs_depth")
def final_loss_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """Validation loss at the end of training against depth, on [MASK] positions where there are.

    Each task has a separate panel, axis and levels, because losses of two tasks do not compare.
    """
    final = evaluated_runs(runs)
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
    layout = {"height": 2.0 if len(cells) <= 2 else 1.5}
    for panel, (_, task, lines) in drawing.fill([name for name, _, _ in cells], cells, **layout):
        value = partial(final_value, column=loss_column(of_task[task]))
        for s in lines:
            panel.points(s.label, points_of(s.by_depth, value), drawing.styles[s], entry=True)
        draw_levels(panel, validation_levels(of_task[task]))
    drawing.depth_axes(depths)
    for task, here in of_task.items():
        same = [p for p, (_, of, _) in zip(drawing.panels, cells, strict=True) if of == task]
        drawing.value_axis(loss_label(here), same)
    require(not drawing.rows("point").empty, "no finished run has a finite validation loss")
    left = len(runs) - len(final)
    drawing.note(f"left out: {counted('{} unfinished runs', left)}", when=left)
    return drawing.finish("Final validation loss against depth")


@chart("solved_vs_depth")
def solved_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """The largest k that a stack solves against depth, for tasks whose answers take k steps."""
    measured = [run for run in runs if "solved" in run.evals]
    require(measured, "no run has a task with k steps (`hops`, `group`)")
    final = evaluated_runs(measured)
    depths = depths_of(final, "finished runs")
    drawing = Drawing(final, options)
    groups = drawing.groups()
    for panel, group in drawing.fill([group.name for group in groups], groups):
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


def runs_of_rates(runs: list[Run]) -> list[Run]:
    """Return the finished runs.  Raises NothingMatchedError for fewer than two learning rates."""
    final = evaluated_runs(runs)
    require(
        len({run.get(LR) for run in final}) > 1, "needs finished runs of two learning rates or more"
    )
    return final


@chart("loss_vs_lr")
def loss_vs_lr(runs: list[Run], *, options: Options) -> Chart:
    """Final validation loss against the learning rate, a curve a depth, the best rate of each."""
    final = runs_of_rates(runs)
    drawing = Drawing(final, options, but=[LR])
    value = partial(final_value, column=loss_column(final))
    curves = {cell: points_of(at, value) for cell, at in runs_by_rate(drawing.series).items()}
    curves = {cell: rows[rows["mark"] != "diverged"] for cell, rows in curves.items()}
    shown = [s for s in drawing.series if any(len(curves[s, n]) for n in s.depths)]
    require(shown, "every run diverged, or has no finite validation loss")
    groups = drawing.setting_groups(series=shown)
    colours = shades(sorted({n for s in shown for n in s.depths}, reverse=True))
    for depth, colour in sorted(colours.items()):
        drawing.entry(f"N = {depth}", marker="o", color=colour)
    for panel, group in drawing.fill([group.name for group in groups], groups):
        (s,) = group.series
        for depth in s.depths:
            rows = curves[s, depth]
            style = {"marker": "o", "color": colours[depth], "linestyle": "-"}
            best = rows[rows["mark"] == ""].nsmallest(1, "y")
            kinds = np.where(rows.index.isin(best.index), "best", "point")
            panel.points(f"N = {depth}", rows.assign(kind=kinds), style)
            if len(best):
                panel.ring(best["x"], best["y"], "best", color=colours[depth])
        draw_levels(panel, validation_levels(s.runs))
    rows = drawing.rows("point", "best")
    drawing.value_axis(loss_label(final), drawing.panels)
    for panel in drawing.panels:
        number_axis(panel.axes, "x", rows["x"].tolist(), log=True)
        panel.axes.set_xlabel("learning rate")
    diverged = sum(map(has_diverged, final))
    left = f"left out: {counted('{} diverged runs', diverged)}; best is among rates without one"
    drawing.note(left, when=diverged)
    unfinished = ", ".join(s.label for s in drawing.series if s not in shown)
    drawing.note(f"nothing finished of {unfinished}", when=unfinished)
    return drawing.finish("Final validation loss against learning rate")


@chart("best_lr_vs_depth")
def best_lr_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """The best learning rate against depth with its 95 % interval, exponent and published laws."""
    drawing = Drawing(runs_of_rates(runs), options, but=(LR,))
    drawing.spread = "95 % interval over seeds"
    losses = {s: losses_of_depths(s.runs) for s in drawing.series}
    require(
        any(len(by_depth) > 1 for by_depth in losses.values()),
        "needs two depths, each with two learning rates and a seed that all of them share",
    )
    (panel,) = drawing.add_panels([None], height=2.2)
    for s, style in drawing.styles.items():
        if len(losses[s]) < 2:
            drawing.note(f"{s.label}: no seed has a loss at every rate of two depths")
            continue
        result = transfer(losses[s])
        rows = pd.DataFrame(
            [(best.depth, *best.rate, best.seeds, "" if best.inside else EDGE_RATE)
             for best in result.best],
            columns=["x", "y", "low", "high", "n", "mark"],
        )  # fmt: skip
        panel.points(s.label, rows, style)
        drawing.entry(f"{s.label}: {result.exponent.text(2) if result.exponent else '–'}", **style)
        for advice in result.advice:
            drawing.note(f"{s.label}, no exponent: {advice}")
        if result.exponent is not None:
            fit = result.exponent.columns("exponent")
            size = {"n": len(result.best), "seeds": result.best[0].seeds}
            drawing.table.add(panel=panel.name, series=s.label, kind="fit", **fit, **size)
    points = drawing.rows("point")
    depths = sorted({int(depth) for depth in points["x"]})
    first = points[points["x"] == depths[0]]["y"]
    anchor = math.exp(sum(map(math.log, first)) / len(first))
    for (name, (power, source)), dash in zip(PUBLISHED_LAWS.items(), DASHES[1:], strict=True):
        law = [anchor * (depth / depths[0]) ** power for depth in depths]
        look: Any = {"color": GREY, "ls": dash, "lw": 0.8}
        panel.lines(name, pd.DataFrame({"x": depths, "y": law}), kind="law", zorder=1.5, **look)
        drawing.entry(f"{typeset_law(name)} ({source})", **look)
    panel.published()
    drawing.depth_axes(depths)
    drawing.value_axis("best learning rate", [panel], log=True)
    drawing.note("laws pass through the mean rate at the smallest depth")
    has_interval = any(n >= LEAST_SEEDS for n in points["n"])
    drawing.note(NO_INTERVAL, when=not has_interval)
    title = "exponent of N, with its 95 % interval" if has_interval else "exponent of N"
    return drawing.finish("Best learning rate against depth", legend_title=title)


def losses_of_depths(runs: Sequence[Run]) -> Losses:
    """Return the final losses at depths with two rates or more and a finite mean loss at one."""
    losses = final_losses(runs, loss_column(runs))
    losses = {depth: by_rate for depth, by_rate in losses.items() if len(by_rate) > 1}
    if not (seeds := shared_seeds(losses)):
        return {}
    return {n: at for n, at in losses.items() if math.isfinite(mean_curve(at, seeds)[1].min())}


def typeset_law(name: str) -> str:
    """Return `N^(−1/2)` with its exponent raised."""
    base, _, exponent = name.partition("^")
    return typeset_power(base, exponent.strip("()"))
