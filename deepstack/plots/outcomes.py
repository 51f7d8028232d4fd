"""Who trains, who stalls, who diverges: one criterion, and the map of schemes over depths."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, NullLocator

from deepstack.analysis.captions import caption_of, title_of
from deepstack.analysis.outcomes import CLEAR, Cell, cell_of, map_cells, runs_with_outcome
from deepstack.analysis.settings import depth_of
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, Table, chart
from deepstack.plots.curves import grid
from deepstack.plots.page import LINE, Handle, Page, wrap
from deepstack.plots.style import STYLE
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
    f"trained: final validation loss more than {CLEAR:g} nats below the unigram's on the same "
    f"positions; stalled: within {CLEAR:g} nats of it; above: further above it; diverged: the loss "
    "left the finite numbers or train.max_loss"
)
ROW, GAP = 0.13, 0.07  # height of a map's row in inches; free margin of a cell
NAME = 1.5  # inches beside a map for the names of its rows
LABEL = float(STYLE["ytick.labelsize"])
LETTER = 0.62 * LABEL / 72  # approximate inches of a letter, to tell whether names fit


def draw_cell(axes: Axes, x: float, y: float, cell: Cell) -> None:
    """A box around (x, y), divided among the outcomes of its seeds."""
    left, width = x - 0.5 + GAP / 2, 1 - GAP
    for name, count in cell.counts.items():
        share = width * count / len(cell.outcomes)
        box = Rectangle(
            (left, y - 0.5 + GAP), share, 1 - 2 * GAP, color=OUTCOME_COLOURS[name], lw=0, zorder=2
        )
        axes.add_patch(box)
        left += share


def map_axes(axes: Axes, columns: Sequence[str], rows: Sequence[str], width: float) -> None:
    """Categories along both axes, the first row on top; width: inches of a panel and its names.

    Names of columns that do not fit beside each other stand upright.
    """
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
        axis.set_major_locator(FixedLocator(list(range(len(names)))))
        axis.set_ticklabels(list(names))
        axis.set_minor_locator(NullLocator())
    beside = LETTER * max(len(line) for row in rows for line in row.split("\n"))
    if LETTER * (max(map(len, columns)) + 1) > (width - beside) / len(columns):
        axes.tick_params(axis="x", labelrotation=90)
    axes.tick_params(length=0)
    axes.grid(False)
    for side in axes.spines.values():
        side.set_visible(False)


def outcome_handles(cells: Sequence[Cell]) -> list[Handle]:
    """Legend entries for the outcomes that occur."""
    occurring = {name for cell in cells for name in cell.counts}
    return [
        Patch(color=OUTCOME_COLOURS[name], lw=0, label=name)
        for name in OUTCOME_COLOURS
        if name in occurring
    ]


def add_rows(table: Table, cell: Cell, **where: object) -> None:
    """A row for each outcome in a cell: its n seeds, and their mean distance from the unigram."""
    for name, count in cell.counts.items():
        both = zip(cell.outcomes, cell.margins, strict=True)
        margins = [m for o, m in both if o == name and m is not None]
        mean = sum(margins) / len(margins) if margins else math.nan
        table.add(kind=name, n=count, value=mean, **where)


def map_notes(runs: Sequence[Run], shown: Sequence[Run], cells: Sequence[Cell]) -> list[str]:
    """Return a map's caption: the criterion, the meaning of a box, and the runs left out."""
    counts = sorted({len(cell.outcomes) for cell in cells})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    notes = [MEANING]
    if counts[-1] > 1:
        notes.append(f"a box is divided among its {seeds} seeds")
    if left := len(runs) - len(shown):
        notes.append(f"left out: {counted('{} runs', left)} without an outcome")
    return notes


@chart("outcomes")
def outcomes(runs: list[Run], *, options: Options) -> Chart:
    """How many seeds of each scheme trained, stalled or diverged at each depth."""
    shown = runs_with_outcome(runs)
    where = map_cells(shown)
    groups: dict[tuple[str, str, int], list[Run]] = {}
    for run in shown:
        place = where[str(run.path)]
        groups.setdefault((place.panel, place.row, depth_of(run)), []).append(run)
    if len(groups) < 2:
        raise NothingMatchedError("needs finished runs of two schemes, depths or settings")
    cells = {key: cell_of(members) for key, members in groups.items()}
    depths = sorted({depth for _, _, depth in cells})
    panels = list(dict.fromkeys(p.panel for p in sorted(where.values(), key=lambda p: p.order)))
    rows = _best_first(cells)
    names = ["\n".join(wrap(row, LABEL, NAME)) for row in rows]
    lines = max(name.count("\n") for name in names)
    height = max((ROW + lines * LINE * LABEL / 72) * len(rows), 0.3)
    down, across = grid(len(panels))
    page = Page(down, across, panels=len(panels), height=height)
    table = Table()
    for axes, panel in zip(page.axes, panels, strict=True):
        axes.set_title(panel)
        map_axes(axes, [str(depth) for depth in depths], names, page.width / across)
        axes.set_xlabel("depth N (layers)")
        for y, row in enumerate(rows):
            for x, depth in enumerate(depths):
                cell = cells.get((panel, row, depth))
                if cell is not None:
                    draw_cell(axes, x, y, cell)
                    add_rows(table, cell, panel=panel or None, series=row, x=depth)
    if len(page.axes) > 1:
        page.outer_labels_only()
    title = "Who trains, stalls and diverges"
    drawn = list(cells.values())
    notes = map_notes(runs, shown, drawn) + caption_of(shown)
    figure = page.finish(title, title_of(shown, ()), notes, outcome_handles(drawn))
    return Chart(figure, table.frame(), title)


def _best_first(cells: dict[tuple[str, str, int], Cell]) -> list[str]:
    """The rows by the share of their seeds that trained, then by name."""
    shares: dict[str, list[str]] = {}
    for (_, row, _), cell in cells.items():
        shares.setdefault(row, []).extend(cell.outcomes)

    def place(row: str) -> tuple[float, float, str]:
        names = shares[row]
        return (
            -names.count("trained") / len(names),
            names.count("diverged") / len(names),
            row.lower(),
        )

    return sorted(shares, key=place)
