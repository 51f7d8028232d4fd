"""Loss against step and against depth, next to losses that need no learning."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from deepstack.analysis.losses import (
    final_value,
    loss_column,
    mask_note,
    training_levels,
    validation_levels,
)
from deepstack.analysis.settings import TASK, depth_of, depths_of
from deepstack.analysis.statistics import has_diverged, last_row, points_of, with_steps
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import Arrangement, curve_rows
from deepstack.plots.draw import Drawing, Panel, level, points, published
from deepstack.plots.page import Handle
from deepstack.plots.style import DASHES, GREY, depth_axis, step_axis
from deepstack.records import Run
from deepstack.records.cells import counted

TRAINING, VALIDATION = "training loss", "validation loss"
MOST_ROWS = 6
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
        level(panel, value, series, series + "{}", dash)


@chart("loss_vs_step")
def loss_vs_step(runs: list[Run], *, options: Options) -> Chart:
    """Training and validation loss against the step, with the levels that need no learning."""
    runs = with_steps(runs)
    drawing = Drawing(runs, options)
    arrangement = Arrangement(drawing)
    shown, notes = arrangement.panels(MOST_ROWS)
    rows = {TRAINING: curve_rows(drawing.series, "loss")}
    validation = VALIDATION + mask_note(runs)
    if any(len(run.evals) for run in runs):
        rows[validation] = curve_rows(drawing.series, loss_column(runs), "evals")
    count = int(rows[TRAINING]["curve"].nunique())
    columns = len(shown) if 1 < len(shown) <= 4 else len(rows)
    if count <= SHARED_PANEL and len(shown) == 1:
        cells, columns = [(shown[0], list(rows))], 1
    elif columns == len(rows):
        cells = [(panel, [quantity]) for panel in shown for quantity in rows]
    else:
        cells = [(panel, [quantity]) for quantity in rows for panel in shown]
    names = [": ".join([p.name or "", *q[: len(q) == 1]]).removeprefix(": ") for p, q in cells]
    height = 1.9 if len(cells) <= 2 else 1.25
    panels = drawing.add_panels(
        [name.removesuffix(": ") or None for name in names], titles=names, columns=columns,
        height=height,
    )  # fmt: skip
    stride = 1
    for panel, ((_, query, here), quantities) in zip(panels, cells, strict=True):
        levels = training_levels(here) if TRAINING in quantities else []
        draw_levels(panel, levels + (validation_levels(here) if validation in quantities else []))
        if TRAINING in quantities:
            part = rows[TRAINING].query(query)
            stride = max(stride, arrangement.draw(panel, part, kind="training"))
        if validation in quantities:
            style: dict[str, Any] = {"marker": "o", "kind": "validation", "ends": False}
            if len(quantities) > 1:
                style |= {"ls": "none", "mfc": "white", "zorder": 4, "band": False}
                style |= {"color": "black"} if count == 1 else {}
            arrangement.draw(panel, rows[validation].query(query), **style)
        published(panel)
    if drawing.rows("training", "validation").empty:
        raise NothingMatchedError("no run has a finite loss")
    steps = drawing.rows()["x"]
    kinds = [set(drawing.rows(kind)["panel"].fillna("")) for kind in ("training", "validation")]
    groups = [[panel for panel in panels if (panel.name or "") in names] for names in kinds]
    log = any(is_wide(drawing, group) for group in groups)
    for group in groups:  # a training loss that runs away does not flatten validation losses
        drawing.value_axis("loss (nats)", group, log=log)
    for panel in panels:
        step_axis(panel.axes, int(steps.min()), int(steps.max()))
    drawn = pd.concat(rows.values())
    entries, more = arrangement.handles(drawn) if count > 1 else ([], [])
    if len(cells) == 1:
        colour = (
            GREY if count > 1 else arrangement.style(*drawn[["line", "depth"]].iloc[0])["color"]
        )
        entries.append(Line2D([], [], color=colour, label=TRAINING))
        mark: Any = {"ls": "none", "marker": "o", "mfc": "white"}
        colour = GREY if count > 1 else "black"
        entries += [Line2D([], [], color=colour, label=q, **mark) for q in list(rows)[1:]]
    notes += more
    if stride > 1:
        notes.append(f"one step in {stride} of the training loss is drawn")
    if at_once := [
        arrangement.label(i, depth_of(run))
        for i, s in enumerate(drawing.series)
        for run in s.runs
        if has_diverged(run) and last_row(run.steps, ["loss"]) is None
    ]:
        notes.append(f"diverged before any finite training loss: {', '.join(at_once)}")
    return drawing.finish("Loss against step", notes, entries)


@chart("final_loss_vs_depth")
def final_loss_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """Validation loss at the end of training against depth, on [MASK] positions where there are.

    Each task has a separate panel, axis and levels, because losses of two tasks do not compare.
    """
    final = [run for run in runs if run.state in ("done", "diverged") and len(run.evals)]
    if not final:
        raise NothingMatchedError("no finished run has a validation loss")
    depths = depths_of(final, "finished runs")
    drawing = Drawing(final, options)
    tasks = list(dict.fromkeys(str(s.runs[0].get(TASK, "?")) for s in drawing.series))
    names = [f"task {task}" for task in tasks] if len(tasks) > 1 else [None]
    handles: list[Handle] = []
    for panel, task in zip(drawing.add_panels(names, height=2.0), tasks, strict=True):
        here = [run for run in final if str(run.get(TASK, "?")) == task]
        draw_levels(panel, validation_levels(here))
        for s, style in zip(drawing.series, drawing.styles, strict=True):
            if s.runs[0] in here:
                rows = points_of(s.by_depth, partial(final_value, column=loss_column(here)))
                points(panel, s.label, rows, style)
                handles += [Line2D([], [], **style, label=s.label)] if len(rows) else []
        published(panel)
        depth_axis(panel.axes, depths)
        label = f"validation loss{mask_note(here)} (nats)"
        drawing.value_axis(label, [panel], log=is_wide(drawing, [panel]))
    if not handles:
        raise NothingMatchedError("no finished run has a finite validation loss")
    left = counted("{} unfinished runs", len(runs) - len(final))
    notes = [f"left out: {left}"] if len(final) < len(runs) else []
    return drawing.finish("Final validation loss against depth", notes, handles)


def is_wide(drawing: Drawing, panels: list[Panel]) -> bool:
    """Return whether the positive values of panels lie so far apart that a log axis shows more."""
    values = drawing.rows(panels=panels)[["y", "low", "high"]].to_numpy(float)
    positive = values[np.isfinite(values) & (values > 0)]
    return bool(len(positive)) and positive.max() / positive.min() > 12
