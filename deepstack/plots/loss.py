"""Loss against step, depth and learning rate, next to losses that need no learning."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from deepstack.analysis.outcomes import map_table
from deepstack.analysis.settings import LR, TASK, depth_of, depths_of
from deepstack.analysis.statistics import (
    SOME_DIVERGED,
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
from deepstack.analysis.tidy import seed_statistics
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import MOST_PANELS, Arrangement, curve_rows, smoothed
from deepstack.plots.drawing import (
    MOST_BANDS,
    Drawing,
    Panel,
    draw_points,
    level,
    points,
    published,
)
from deepstack.plots.page import Handle
from deepstack.plots.style import DASHES, GREY, depth_axis, extent, log_axis, shade, step_axis
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
        level(panel, value, series, series + "{}", dash)


@chart("loss_vs_step")
def loss_vs_step(runs: list[Run], *, options: Options) -> Chart:
    """Training and validation loss against the step, with the levels that need no learning."""
    runs = with_steps(runs)
    drawing = Drawing(runs, options)
    arrangement = Arrangement(drawing, multiples=True)
    multiples = arrangement.multiples and arrangement.by_depth
    shown, notes = arrangement.panels(MOST_PANELS if multiples else MOST_ROWS)
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
    if count <= SHARED_PANEL and len(shown) == 1:
        cells, columns = [(shown[0], list(rows))], 1
    elif multiples:
        cells, columns = [(panel, list(rows)) for panel in shown], 3
    elif 1 < len(shown) <= 4:
        cells, columns = [(panel, [q]) for q in rows for panel in shown], len(shown)
    else:
        cells, columns = [(panel, [q]) for panel in shown for q in rows], len(rows)
    names = [": ".join([p[0] or "", *q[: len(q) == 1]]).removeprefix(": ") for p, q in cells]
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
            stride = max(stride, arrangement.draw(panel, part, log=False, kind="training"))
        if validation in quantities:
            style: dict[str, Any] = {"marker": "o", "kind": "validation", "ends": False}
            if len(quantities) > 1:
                style |= {"ls": "none", "mfc": "white", "zorder": 4, "band": False}
                style |= {"color": "black"} if count == 1 else {}
            arrangement.draw(panel, rows[validation].query(query), log=False, **style)
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
    if len(cells) == 1 or multiples:
        line, depth = drawn[["line", "depth"]].iloc[0]
        line_color = arrangement.style(line, depth)["color"]
        first, second = (GREY, GREY) if count > 1 else (line_color, "black")
        entries.append(Line2D([], [], color=first, label=TRAINING))
        mark: Any = {"ls": "none", "marker": "o", "mfc": "white", "color": second}
        entries += [Line2D([], [], label=quantity, **mark) for quantity in list(rows)[1:]]
    notes += more
    if width > 1:
        notes.append(f"training loss: mean over {width} steps")
    if stride > 1:
        notes.append(f"one step in {stride} of the training loss is drawn")
    if at_once := [
        arrangement.label(i, depth_of(run))
        for i, s in enumerate(drawing.series)
        for run in s.runs
        if has_diverged(run) and last_row(run.steps, "loss") is None
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
    cells = []
    for task in tasks:
        for group, members in drawing.groups():
            lines = [i for i in members if str(drawing.series[i].runs[0].get(TASK, "?")) == task]
            name = ": ".join(filter(None, [f"task {task}" * (len(tasks) > 1), group]))
            cells += [(name or None, task, lines)] if lines else []
    handles: list[Handle] = []
    height = 2.0 if len(cells) <= 2 else 1.5
    panels = drawing.add_panels([name for name, _, _ in cells], height=height)
    for panel, (_, task, lines) in zip(panels, cells, strict=True):
        here = [run for run in final if str(run.get(TASK, "?")) == task]
        draw_levels(panel, validation_levels(here))
        for i in lines:
            s, style = drawing.series[i], drawing.styles[i]
            rows = points_of(s.by_depth, partial(final_value, column=loss_column(here)))
            points(panel, s.label, rows, style, bars=len(lines) > MOST_BANDS)
            handles += [Line2D([], [], **style, label=s.label)] if len(rows) else []
        published(panel)
        depth_axis(panel.axes, depths)
    for task in tasks:
        same = [p for p, (_, of, _) in zip(panels, cells, strict=True) if of == task]
        here = [run for run in final if str(run.get(TASK, "?")) == task]
        label = f"validation loss{mask_note(here)} (nats)"
        drawing.value_axis(label, same, log=is_wide(drawing, same))
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


@chart("loss_vs_lr")
def loss_vs_lr(runs: list[Run], *, options: Options) -> Chart:
    """Final validation loss against the learning rate, a curve a depth, the best rate of each."""
    final = [run for run in runs if run.state in ("done", "diverged") and len(run.evals)]
    table = map_table(final, by_lr=True) if final else None
    if table is None or table.groupby(["name", "depth"])["lr"].nunique().max() < 2:
        raise NothingMatchedError("needs finished runs of two learning rates at one depth")
    column = loss_column(final)
    table["diverged"] = [has_diverged(run) for run in table["run"]]
    table["value"] = [math.nan if has_diverged(r) else final_value(r, column) for r in table["run"]]
    table = table.sort_values(["depth", "lr"], kind="stable")
    finite = set(table["name"][np.isfinite(table["value"])])
    unfinished = [name for name in dict.fromkeys(table["name"]) if name not in finite]
    table = table[table["name"].isin(finite)]
    if table.empty:
        raise NothingMatchedError("every run diverged, or has no finite validation loss")
    depths = sorted(set(table["depth"]))
    colours = {n: shade(len(depths) - 1 - i, len(depths)) for i, n in enumerate(depths)}
    drawing = Drawing(final, options, but=[LR])
    for panel in drawing.add_panels(list(dict.fromkeys(table["name"])), height=1.9):
        here = table[table["name"] == panel.name]
        draw_levels(panel, validation_levels(here["run"].tolist()))
        for depth, members in here.groupby("depth"):
            rows, series = seed_statistics(members, "lr"), f"N = {depth}"
            diverged_at = members.groupby("lr")["diverged"].sum()
            rows = rows.set_index("x").reindex(diverged_at.index).rename_axis("x").reset_index()
            rows["n"] = rows["n"].fillna(0).astype(int)
            rows["mark"] = [SOME_DIVERGED if count else "" for count in diverged_at]
            drawn = rows[rows["n"] > 0]
            style: dict[str, Any] = {"marker": "o", "color": colours[depth], "linestyle": "-"}
            draw_points(panel, drawn, style)
            undiverged = drawn[drawn["mark"] == ""]
            best = [undiverged["y"].idxmin()] if len(undiverged) else []
            ring = rows.loc[best]
            panel.axes.plot(
                ring["x"], ring["y"], **style | {"ms": 9, "mfc": "none", "linestyle": "none"}
            )
            rows["kind"] = np.where(rows.index.isin(best), "best", "point")
            rows["mark"] = [f"{count} diverged" if count else "" for count in diverged_at]
            panel.add(rows, series=series)
    rows = drawing.rows("point", "best")
    drawing.value_axis(f"validation loss{mask_note(final)} (nats)", drawing.panels, log=False)
    for panel in drawing.panels:
        log_axis(panel.axes, "x", *extent(rows["x"].tolist()))
        panel.axes.set_xlabel("learning rate")
    handles: list[Handle] = [
        Line2D([], [], marker="o", color=colour, label=f"N = {depth}")
        for depth, colour in colours.items()
        if (rows["n"] * (rows["series"] == f"N = {depth}")).any()
    ]
    if (rows["kind"] == "best").any():
        look: Any = {"ls": "none", "marker": "o", "ms": 9, "mfc": "none", "mec": GREY}
        handles.append(Line2D([], [], label="best", **look))
    notes = []
    if diverged := sum(map(has_diverged, final)):
        left = counted("{} diverged runs", diverged)
        notes.append(f"left out: {left}; best is among rates without one")
    if unfinished:
        notes.append(f"nothing finished of {', '.join(unfinished)}")
    return drawing.finish("Final validation loss against learning rate", notes, handles)
