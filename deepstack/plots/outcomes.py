"""Maps of outcomes (learnt, at chance, worse, diverged) over schemes, depths, learning rates."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from deepstack.base.text import counted
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.drawing import Drawing
from deepstack.plots.page import LINE, wrap
from deepstack.plots.panel import Panel
from deepstack.plots.style import LETTER, STYLE, axis_number
from deepstack.plots.texts import drawn
from deepstack.records import Run
from deepstack.runs.cells import runs_by_rate
from deepstack.runs.outcomes import FAR, LEARNT, OUTCOME_WORDS, margin, outcome
from deepstack.runs.runs import Runs
from deepstack.runs.series import Series
from deepstack.runs.settings import LR, require

# From dark to light and to black, so that a grey print tells them apart too.
OUTCOME_COLOURS = {
    "trained": "#0072B2",
    "stalled": "#F3DFA2",
    "above": "#E08A3C",
    "diverged": "#000000",
}
MEANING = (
    f"learnt: {LEARNT}; worse: this interval begins more than {FAR:g} nats above "
    "this predictor; at chance: neither; diverged: the loss became NaN or "
    "infinite, or exceeded train.max_loss"
)
NO_OUTCOME = "no finished run has a validation loss that can be compared with one without context"
ROW_HEIGHT, CELL_GAP = 0.13, 0.07  # height of a map's row in inches; free margin of a cell
RATE_ROW = 0.15
NAME = 1.5  # inches beside a map for the names of its rows
LABEL = STYLE["ytick.labelsize"]
EDGE: dict[str, Any] = {"color": "#D01C1C", "lw": 1.6, "zorder": 3, "solid_capstyle": "butt"}


def draw_cell(panel: Panel, x: float, y: float, cell: Sequence[Run], row: dict[str, Any]) -> None:
    """A box around (x, y), divided among the outcomes of its seeds; a row of the table for each.

    row: its other columns.  Its value is the mean distance of its n seeds from the loss without
        context.
    """
    left, width = x - 0.5 + CELL_GAP / 2, 1 - CELL_GAP
    for name, colour in OUTCOME_COLOURS.items():
        seeds = [run for run in cell if outcome(run) == name]
        if seeds:
            share, bottom = width * len(seeds) / len(cell), y - 0.5 + CELL_GAP
            box = Rectangle((left, bottom), share, 1 - 2 * CELL_GAP, color=colour, lw=0, zorder=2)
            panel.axes.add_patch(box)
            left += share
            value = math.nan if name == "diverged" else np.mean([margin(run) for run in seeds])
            counted_seeds = pd.DataFrame({"n": [len(seeds)], "value": [value]})
            panel.add(counted_seeds, kind=name, **row)


def map_axes(axes: Axes, depths: Sequence[int], rows: Sequence[str], width: float) -> None:
    """Categories along both axes, the first row on top; width: inches of a panel and its names.

    Depths that do not fit beside each other stand upright.
    """
    axes.set(xlim=(-0.5, len(depths) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xticks(range(len(depths)), list(map(str, depths)))
    labels = ["\n".join(map(drawn, row.split("\n"))) for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    beside = LETTER * max(len(line) for row in rows for line in row.split("\n"))
    if LETTER * (len(str(depths[-1])) + 1) > (width - beside) / len(depths):
        axes.tick_params(axis="x", labelrotation=90)
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("depth N (layers)")


def finish(drawing: Drawing, title: str, sizes: Sequence[int], left_out: int) -> Chart:
    """Finish a map; its caption has the criterion, the meaning of a box, and the runs left out."""
    seeds = " to ".join(str(n) for n in sorted({min(sizes), max(sizes)}))
    drawing.define(MEANING)
    drawing.note(f"a box is divided among its {seeds} seeds", when=max(sizes) > 1)
    drawing.note(f"left out: {counted('{} runs', left_out)} without an outcome", when=left_out)
    kinds = {row["kind"] for row in drawing.table.rows}
    for name, colour in OUTCOME_COLOURS.items():
        if name in kinds:
            drawing.entry(OUTCOME_WORDS[name], patch=True, color=colour, lw=0)
    if any(row["kind"] == "frontier" and row["mark"] != "none" for row in drawing.table.rows):
        drawing.entry("largest rate at which all seeds learn", **EDGE)
    return drawing.finish(title)


@chart("outcomes", main=7)
def outcomes(runs: Runs, *, options: Options) -> Chart:
    """How many seeds of each setting learnt, stayed at chance or diverged at each depth."""
    shown = runs.keep(outcome, NO_OUTCOME)
    drawing = Drawing(shown, options)
    require(
        len(drawing.series) * len(drawing.depths) > 1,
        "needs finished runs of two schemes, depths or settings",
    )
    groups = drawing.groups(lines=len(drawing.series))
    is_ordered = options.schemes or options.ordered
    rows = [g.series if is_ordered else sorted(g.series, key=learning_order) for g in groups]
    labels = [
        [row_label(s, g.name) for s in series] for g, series in zip(groups, rows, strict=True)
    ]
    names = [["\n".join(wrap(label, LABEL, NAME)) for label in each] for each in labels]
    heights = [
        sum(ROW_HEIGHT + name.count("\n") * LINE * LABEL / 72 for name in each) for each in names
    ]
    sizes = []
    layout: Any = {"columns": 1, "height": max(0.3, *heights), "published": False}
    for i, (panel, _) in enumerate(drawing.arrange(groups, **layout)):
        map_axes(panel.axes, drawing.depths, names[i], drawing.page.width)
        for y, s in enumerate(rows[i]):
            for depth in s.depths:
                where = {"series": labels[i][y], "x": depth}
                draw_cell(panel, drawing.depths.index(depth), y, s.at(depth), where)
                sizes.append(len(s.at(depth)))
    title = "Which settings learn, at each depth"
    return finish(drawing, title, sizes, len(runs) - len(shown))


def row_label(series: Series, panel: str | None) -> str:
    """Return the label of a series without the value that its panel names."""
    return ", ".join(part for part in series.label.split(", ") if part != panel) or series.label


def learning_order(series: Series) -> tuple[float, float, str]:
    """Return a key that sorts series that learn most often first, then those that diverge least."""
    ends = [outcome(run) for depth in series.depths for run in series.at(depth)]
    learnt, diverged = (ends.count(name) / len(ends) for name in ("trained", "diverged"))
    return (-learnt, diverged, series.label.lower())


@chart("frontier")
def frontier(runs: Runs, *, options: Options) -> Chart:
    """The largest learning rate at which every seed learns, against depth, and the map around."""
    shown = runs.keep(outcome, NO_OUTCOME)
    drawing = Drawing(shown, replace(options, x_scale=None), but=[LR])  # depths are categories
    cells = runs_by_rate(drawing.series)
    rates = sorted({float(lr) for at in cells.values() for lr in at}, reverse=True)
    groups = drawing.groups("series")
    sizes = []
    height = RATE_ROW * len(rates)
    for panel, group in drawing.arrange(groups, height=height, published=False):
        (s,) = group.series
        width = drawing.page.width / drawing.page.columns
        map_axes(panel.axes, drawing.depths, [axis_number(lr) for lr in rates], width)
        panel.axes.set_ylabel("learning rate")
        for depth in s.depths:
            x, where = drawing.depths.index(depth), {"series": s.label, "x": depth}
            for lr, seeds in cells[s, depth].items():
                draw_cell(panel, x, rates.index(lr), seeds, where | {"y": lr})
                sizes.append(len(seeds))
            learnt = [
                lr
                for lr, seeds in cells[s, depth].items()
                if all(outcome(run) == "trained" for run in seeds)
            ]
            row = {"panel": panel.name, "kind": "frontier"} | where
            if not learnt:
                drawing.table.add(mark="none", **row)
                continue
            best = max(learnt)
            top = rates.index(best) - 0.5
            panel.axes.plot([x - 0.5, x + 0.5], [top, top], clip_on=False, **EDGE)
            # The true one may be larger than the largest that was tried.
            row["mark"] = "at least" if best == max(cells[s, depth]) else None
            drawing.table.add(y=best, n=len(cells[s, depth][best]), **row)
    title = "The largest learning rate that learns, against depth"
    return finish(drawing, title, sizes, len(runs) - len(shown))
