"""Maps of outcomes (learnt, at chance, worse, diverged) over schemes, depths, learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from deepstack.analysis.outcomes import CLEAR, OUTCOME_WORDS, map_table, runs_with_outcome
from deepstack.analysis.settings import LR
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.drawing import Drawing
from deepstack.plots.page import LINE, wrap
from deepstack.plots.panel import Panel
from deepstack.plots.style import LETTER, STYLE, number
from deepstack.records import Run
from deepstack.records.cells import counted

# From dark to light and to black, so that a grey print tells them apart too.
OUTCOME_COLOURS = {
    "trained": "#0072B2",
    "stalled": "#F3DFA2",
    "above": "#E08A3C",
    "diverged": "#000000",
}
MEANING = (
    f"learnt: final validation loss more than {CLEAR:g} nats below the unigram's on the same "
    f"positions; at chance: within {CLEAR:g} nats of it; worse: further above it; diverged: the "
    "loss left the finite numbers or train.max_loss"
)
ROW, GAP = 0.13, 0.07  # height of a map's row in inches; free margin of a cell
RATE_ROW = 0.15
NAME = 1.5  # inches beside a map for the names of its rows
LABEL = STYLE["ytick.labelsize"]
EDGE: dict[str, Any] = {"color": "#D01C1C", "lw": 1.6, "zorder": 3, "solid_capstyle": "butt"}


def draw_cell(panel: Panel, x: float, y: float, cell: pd.DataFrame, row: dict[str, Any]) -> None:
    """A box around (x, y), divided among the outcomes of its seeds; a row of the table for each.

    row: its other columns.  Its value is the mean distance of its n seeds from the unigram.
    """
    left, width = x - 0.5 + GAP / 2, 1 - GAP
    for name, colour in OUTCOME_COLOURS.items():
        seeds = cell[cell["outcome"] == name]
        if len(seeds):
            share, bottom = width * len(seeds) / len(cell), y - 0.5 + GAP
            box = Rectangle((left, bottom), share, 1 - 2 * GAP, color=colour, lw=0, zorder=2)
            panel.axes.add_patch(box)
            left += share
            counted_seeds = pd.DataFrame({"n": [len(seeds)], "value": seeds["margin"].mean()})
            panel.add(counted_seeds, kind=name, **row)


def map_axes(axes: Axes, depths: Sequence[int], rows: Sequence[str], width: float) -> None:
    """Categories along both axes, the first row on top; width: inches of a panel and its names.

    Depths that do not fit beside each other stand upright.
    """
    axes.set(xlim=(-0.5, len(depths) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xticks(range(len(depths)), list(map(str, depths)))
    axes.set_yticks(range(len(rows)), list(rows))
    beside = LETTER * max(len(line) for row in rows for line in row.split("\n"))
    if LETTER * (len(str(depths[-1])) + 1) > (width - beside) / len(depths):
        axes.tick_params(axis="x", labelrotation=90)
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("depth N (layers)")


def finish(drawing: Drawing, title: str, sizes: pd.Series[int], left_out: int) -> Chart:
    """Finish a map; its caption has the criterion, the meaning of a box, and the runs left out."""
    seeds = " to ".join(str(n) for n in sorted({int(sizes.min()), int(sizes.max())}))
    drawing.note(MEANING)
    drawing.note(f"a box is divided among its {seeds} seeds", when=sizes.max() > 1)
    drawing.note(f"left out: {counted('{} runs', left_out)} without an outcome", when=left_out)
    kinds = {row["kind"] for row in drawing.table.rows}
    for name, colour in OUTCOME_COLOURS.items():
        if name in kinds:
            drawing.entry(OUTCOME_WORDS[name], patch=True, color=colour, lw=0)
    if any(row["kind"] == "frontier" and row["mark"] != "none" for row in drawing.table.rows):
        drawing.entry("largest rate at which all seeds learn", **EDGE)
    return drawing.finish(title)


@chart("outcomes")
def outcomes(runs: list[Run], *, options: Options) -> Chart:
    """How many seeds of each scheme learnt, stayed at chance or diverged at each depth."""
    shown = runs_with_outcome(runs)
    table = map_table(shown)
    sizes = table.groupby(["panel", "row", "depth"]).size()
    if len(sizes) < 2:
        raise NothingMatchedError("needs finished runs of two schemes, depths or settings")
    depths = sorted(set(table["depth"]))
    shares = table.groupby("row")["outcome"].value_counts(normalize=True).unstack(fill_value=0)
    shares = shares.reindex(columns=list(OUTCOME_COLOURS), fill_value=0.0)
    best_first = sorted(
        shares.index, key=lambda r: (-shares["trained"][r], shares["diverged"][r], r.lower())
    )
    if options.schemes:
        best_first = list(dict.fromkeys(table["row"]))
    names = ["\n".join(wrap(row, LABEL, NAME)) for row in best_first]
    most_lines = max(name.count("\n") for name in names)
    height = max((ROW + most_lines * LINE * LABEL / 72) * len(names), 0.3)
    drawing = Drawing(shown, options)
    panels = list(dict.fromkeys(table.sort_values("order", kind="stable")["panel"]))
    for panel in drawing.add_panels(panels, height=height):
        map_axes(panel.axes, depths, names, drawing.page.width / drawing.page.columns)
        for (row, depth), cell in table[table["panel"] == (panel.name or "")].groupby(
            ["row", "depth"]
        ):
            where = {"series": row, "x": depth}
            draw_cell(panel, depths.index(depth), best_first.index(row), cell, where)
    return finish(drawing, "Which schemes learn, at each depth", sizes, len(runs) - len(shown))


@chart("frontier")
def frontier(runs: list[Run], *, options: Options) -> Chart:
    """The largest learning rate at which every seed learns, against depth, and the map around."""
    shown = runs_with_outcome(runs)
    table = map_table(shown, by_lr=True)
    rates = sorted(set(table["lr"]), reverse=True)
    if table.groupby(["name", "depth"])["lr"].nunique().max() < 2:
        raise NothingMatchedError("needs finished runs of two learning rates at one depth")
    depths = sorted(set(table["depth"]))
    drawing = Drawing(shown, options, but=[LR])
    names = list(dict.fromkeys(table["name"]))
    for panel in drawing.add_panels(names, height=RATE_ROW * len(rates)):
        width = drawing.page.width / drawing.page.columns
        map_axes(panel.axes, depths, [number(rate) for rate in rates], width)
        panel.axes.set_ylabel("learning rate")
        for depth, column in table[table["name"] == panel.name].groupby("depth"):
            x, where = depths.index(depth), {"series": panel.name, "x": depth}
            for rate, cell in column.groupby("lr"):
                draw_cell(panel, x, rates.index(rate), cell, where | {"y": rate})
            trained = (column["outcome"] == "trained").groupby(column["lr"]).agg(["all", "size"])
            complete = trained[trained["all"]]
            row = {"panel": panel.name, "kind": "frontier"} | where
            if complete.empty:
                drawing.table.add(mark="none", **row)
                continue
            best, largest_rate = complete.index[-1], trained.index[-1]
            top = rates.index(best) - 0.5
            panel.axes.plot([x - 0.5, x + 0.5], [top, top], clip_on=False, **EDGE)
            # The true one may be larger than the largest that was tried.
            row["mark"] = "at least" if best == largest_rate else None
            drawing.table.add(y=best, n=int(complete["size"].iloc[-1]), **row)
    sizes = table.groupby(["name", "depth", "lr"]).size()
    title = "The largest learning rate that learns, against depth"
    return finish(drawing, title, sizes, len(runs) - len(shown))
