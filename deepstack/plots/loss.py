"""Loss and the largest solved k against step and depth, next to losses that need no learning."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd

from deepstack.analysis.settings import TASK, depth_of, depths_of
from deepstack.analysis.statistics import (
    evaluated_runs,
    final_value,
    has_diverged,
    last_row,
    loss_column,
    mask_note,
    points_of,
    training_levels,
    validation_levels,
    with_steps,
)
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import MOST_PANELS, Arrangement, curve_rows, smoothed
from deepstack.plots.drawing import Drawing, axis_label
from deepstack.plots.panel import MOST_BANDS, Panel
from deepstack.plots.style import DASHES, GREY
from deepstack.records import Run
from deepstack.records.cells import counted

TRAINING, VALIDATION = "training loss", "validation loss"
MOST_ROWS = 6
CROWDED_PARTS = 20  # crowded training losses are means over this part of all steps
SHARED_PANEL = 3  # curves up to which training and validation loss share one panel
LEVELS: dict[str, tuple[str, Any]] = {
    "unigram_entropy": ("unigram entropy", DASHES[1]),
    "context_free_entropy": ("best without context", DASHES[2]),
    "uniform_entropy": ("uniform guess", DASHES[3]),
    "bayes_loss": ("Bayes optimum", "-"),
}


def draw_levels(panel: Panel, levels: list[tuple[str, float]]) -> None:
    """Draw horizontal lines to compare a loss with."""
    for name, value in dict.fromkeys(levels):
        series, dash = LEVELS[name]
        panel.level(value, series, series + "{}", dash)


def loss_label(runs: list[Run]) -> str:
    """Return the label of the axis of the final validation loss."""
    return f"{VALIDATION}{mask_note(runs)} (nats)"


@chart("loss_vs_step")
def loss_vs_step(runs: list[Run], *, options: Options) -> Chart:
    """Training and validation loss against the step, with the levels that need no learning."""
    runs = with_steps(runs)
    drawing = Drawing(runs, options)
    arrangement = Arrangement(drawing, multiples=True)
    multiples = arrangement.multiples and arrangement.by_depth
    shown = arrangement.panels(MOST_PANELS if multiples else MOST_ROWS)
    multiples = multiples or len(shown) > MOST_ROWS
    rows = {TRAINING: curve_rows(drawing.series, "loss")}
    validation = VALIDATION + mask_note(runs)
    if any(len(run.evals) for run in runs):
        rows[validation] = curve_rows(drawing.series, loss_column(runs), "evals")
    count = int(rows[TRAINING]["curve"].nunique())
    width = options.smooth
    if width == 1 and (multiples or count > MOST_BANDS * len(shown)):
        width = max(1, int(rows[TRAINING]["x"].max()) // CROWDED_PARTS)
    rows[TRAINING] = smoothed(rows[TRAINING], width)
    shares_panel = multiples or (count <= SHARED_PANEL and len(shown) == 1)
    if shares_panel:
        cells, columns = [(panel, list(rows)) for panel in shown], min(3, len(shown))
    elif 1 < len(shown) <= 4:
        cells, columns = [(panel, [q]) for q in rows for panel in shown], len(shown)
    else:
        cells, columns = [(panel, [q]) for panel in shown for q in rows], len(rows)
    names = [": ".join([p.name or "", *q[: len(q) == 1]]).removeprefix(": ") for p, q in cells]
    layout: Any = {"columns": columns, "height": 1.9 if len(cells) <= 2 else 1.25}
    panel_names = [name.removesuffix(": ") for name in names]
    for panel, ((_, query, here), q) in drawing.fill(panel_names, cells, titles=names, **layout):
        levels = training_levels(here) if TRAINING in q else []
        draw_levels(panel, levels + (validation_levels(here) if validation in q else []))
        if TRAINING in q:
            part = rows[TRAINING].query(query)
            arrangement.draw(panel, part, log=False, kind="training")
        if validation in q:
            style: dict[str, Any] = {"marker": "o", "kind": "validation", "ends": False}
            if len(q) > 1:
                style |= {"ls": "none", "mfc": "white", "zorder": 4, "band": False}
                style |= {"color": "black"} if count == 1 else {}
            arrangement.draw(panel, rows[validation].query(query), log=False, **style)
    if drawing.rows("training", "validation").empty:
        raise NothingMatchedError("no run has a finite loss")
    drawn_in = [set(drawing.rows(kind)["panel"]) for kind in ("training", "validation")]
    groups = [[panel for panel in drawing.panels if panel.name in names] for names in drawn_in]
    log = any(map(drawing.is_wide, groups))
    for group in groups:  # a training loss that runs away does not flatten validation losses
        drawing.value_axis("loss (nats)", group, log=log)
    drawing.step_axes()
    drawn = pd.concat(rows.values())
    if count > 1:
        arrangement.explain(drawn)
    if shares_panel or len(cells) == 1:
        line, depth = drawn[["line", "depth"]].iloc[0]
        line_color = arrangement.style(line, depth)["color"]
        first, second = (GREY, GREY) if count > 1 else (line_color, "black")
        drawing.entry(TRAINING, color=first)
        mark: Any = {"ls": "none", "marker": "o", "mfc": "white", "color": second}
        for quantity in list(rows)[1:]:
            drawing.entry(quantity, **mark)
    drawing.note(f"training loss: mean over {width} steps", when=width > 1)
    if arrangement.stride > 1:
        drawing.note(f"one step in {arrangement.stride} of the training loss is drawn")
    if at_once := [
        arrangement.label(i, depth_of(run))
        for i, s in enumerate(drawing.series)
        for run in s.runs
        if has_diverged(run) and last_row(run.steps, "loss") is None
    ]:
        drawing.note(f"diverged before any finite training loss: {', '.join(at_once)}")
    return drawing.finish("Loss against step")


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
        for group, members in drawing.groups():
            name = ": ".join(filter(None, [f"task {task}" * (len(tasks) > 1), group]))
            lines = [s for s in members if s.runs[0] in here]
            cells += [(name, task, lines)] if lines else []
    layout = {"height": 2.0 if len(cells) <= 2 else 1.5}
    for panel, (_, task, lines) in drawing.fill([name for name, _, _ in cells], cells, **layout):
        draw_levels(panel, validation_levels(of_task[task]))
        value = partial(final_value, column=loss_column(of_task[task]))
        for s in lines:
            rows = points_of(s.by_depth, value)
            bars = len(lines) > MOST_BANDS
            panel.points(s.label, rows, drawing.styles[s], bars, entry=True)
    drawing.depth_axes(depths)
    for task, here in of_task.items():
        same = [p for p, (_, of, _) in zip(drawing.panels, cells, strict=True) if of == task]
        drawing.value_axis(loss_label(here), same, log=drawing.is_wide(same))
    if drawing.rows("point").empty:
        raise NothingMatchedError("no finished run has a finite validation loss")
    left = len(runs) - len(final)
    drawing.note(f"left out: {counted('{} unfinished runs', left)}", when=left)
    return drawing.finish("Final validation loss against depth")


@chart("solved_vs_depth")
def solved_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """The largest k that a stack solves against depth, for tasks whose answers take k steps."""
    measured = [run for run in runs if "solved" in run.evals]
    if not measured:
        raise NothingMatchedError("no run has a task with k steps (`hops`, `group`)")
    final = evaluated_runs(measured)
    depths = depths_of(final, "finished runs")
    drawing = Drawing(final, options)
    groups = drawing.groups()
    for panel, (_, members) in drawing.fill([name for name, _ in groups], groups):
        for s in members:
            rows = points_of(s.by_depth, partial(final_value, column="solved"))
            bars = len(members) > MOST_BANDS
            panel.points(s.label, rows, drawing.styles[s], bars, entry=True)
    drawing.depth_axes(depths)
    label = axis_label(final, "solved", "largest k solved").removesuffix(" k")
    drawing.value_axis(label, drawing.panels, log=False, include=0.0)
    drawing.note("solved: every accuracy up to k is above 0.95")
    left = len(runs) - len(final)
    drawing.note(f"left out: {counted('{} runs', left)} unfinished or of other tasks", when=left)
    return drawing.finish("Largest k solved against depth")
