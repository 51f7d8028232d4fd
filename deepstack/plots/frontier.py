"""The largest learning rate that trains, against depth: a map for each scheme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from deepstack.analysis.captions import caption_of, title_of
from deepstack.analysis.outcomes import Cell, cell_of, map_cells, runs_with_outcome
from deepstack.analysis.settings import depth_of
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, Table, chart
from deepstack.plots.curves import grid
from deepstack.plots.outcomes import add_rows, draw_cell, map_axes, map_notes, outcome_handles
from deepstack.plots.page import Handle, Page
from deepstack.plots.style import number
from deepstack.records import Run

LR = "train.lr"
ROW = 0.15
EDGE: dict[str, Any] = {"color": "#D01C1C", "lw": 1.6, "zorder": 3, "solid_capstyle": "butt"}


def lr_of(run: Run) -> float:
    return float(run.get(LR, 0.0))


@chart("frontier")
def frontier(runs: list[Run], *, options: Options) -> Chart:
    """The largest learning rate at which every seed trains, against depth, and the map around."""
    shown = runs_with_outcome(runs)
    rates = sorted({lr_of(run) for run in shown}, reverse=True)
    if len(rates) < 2:
        raise NothingMatchedError("needs finished runs of two learning rates or more")
    where = map_cells(shown, but=[LR])
    groups: dict[tuple[str, int, float], list[Run]] = {}
    for run in shown:
        cell_name = where[str(run.path)]
        groups.setdefault((cell_name.name, depth_of(run), lr_of(run)), []).append(run)
    cells = {key: cell_of(members) for key, members in groups.items()}
    panels = list(dict.fromkeys(name for name, _, _ in cells))
    depths = sorted({depth for _, depth, _ in cells})
    down, across = grid(len(panels))
    page = Page(down, across, panels=len(panels), height=ROW * len(rates))
    table = Table()
    for axes, panel in zip(page.axes, panels, strict=True):
        axes.set_title(panel if len(panels) > 1 else "")
        named = [number(rate) for rate in rates]
        map_axes(axes, [str(depth) for depth in depths], named, page.width / across)
        axes.set_xlabel("depth N (layers)")
        axes.set_ylabel("learning rate")
        for x, depth in enumerate(depths):
            column = {rate: cells[panel, depth, rate] for rate in rates
                      if (panel, depth, rate) in cells}  # fmt: skip
            for rate, cell in column.items():
                draw_cell(axes, x, rates.index(rate), cell)
                add_rows(table, cell, panel=panel, series=panel, x=depth, y=rate)
            if not column:
                continue
            best = largest(column)
            if best is None:
                table.add(panel=panel, series=panel, kind="frontier", x=depth, mark="none")
                continue
            _edge(axes, x, rates.index(best))
            mark = "at least" if best == max(column) else None
            n = len(column[best].outcomes)
            table.add(panel=panel, series=panel, kind="frontier", x=depth, y=best, n=n, mark=mark)
    page.outer_labels_only()
    title = "The largest learning rate that trains, against depth"
    drawn = list(cells.values())
    handles: list[Handle] = outcome_handles(drawn)
    if any(row["kind"] == "frontier" and row.get("mark") != "none" for row in table.rows):
        handles.append(Line2D([], [], **EDGE, label="largest rate at which all seeds train"))
    notes = map_notes(runs, shown, drawn) + caption_of(shown)
    figure = page.finish(title, title_of(shown, ()), notes, handles)
    return Chart(figure, table.frame(), title)


def largest(column: Mapping[float, Cell]) -> float | None:
    """The largest learning rate at which every seed trained, or None.

    Where that is the largest that was tried, the true one may be larger.
    """
    return max((rate for rate, cell in column.items() if cell.all_trained), default=None)


def _edge(axes: Axes, x: int, y: int) -> None:
    """The line on top of a cell: the frontier."""
    axes.plot([x - 0.5, x + 0.5], [y - 0.5, y - 0.5], clip_on=False, **EDGE)
