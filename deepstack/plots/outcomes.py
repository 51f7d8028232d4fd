"""Who trains, who stalls, who diverges: one criterion, and the map of schemes over depths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, NullLocator

from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, Table, chart
from deepstack.plots.curves import grid
from deepstack.plots.page import LINE, Handle, Page, wrap
from deepstack.plots.series import (
    DATA,
    DEPTH,
    SCHEME,
    TASK,
    caption_of,
    depth_of,
    differing,
    one_a_seed,
    owners_told,
    scheme_label,
    setting,
    title_of,
    value_said,
)
from deepstack.plots.style import STYLE
from deepstack.plots.values import last_row
from deepstack.records import Run
from deepstack.records.cells import counted

# Nats between a loss and the unigram's on the same positions that count as a difference.
CLEAR = 0.1
# From dark to light and to black, so that a grey print tells them apart too.
OUTCOMES = {
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
OPTION = "model.scheme_options."
ROW, GAP = 0.13, 0.07  # height of a map's row in inches; what is left free of a cell
NAME = 1.5  # inches beside a map for the names of its rows
LABEL = float(STYLE["ytick.labelsize"])
LETTER = 0.62 * LABEL / 72  # inches of a letter, about: enough to see whether names have room


def margin(run: Run) -> float | None:
    """L - L_0: the final validation loss minus what a predictor without context pays, in nats.

    None without an evaluation or anything to compare with.
    """
    loss, floor = loss_and_floor(run)
    return None if loss is None or floor is None else loss - floor


def loss_and_floor(run: Run) -> tuple[float | None, float | None]:
    """L and L_0: the final validation loss, and what a predictor without context pays, in nats.

    L is taken where [MASK] is shown, L_0 is the unigram's loss on the same positions, of the same
    row of evals.csv.  A run that has no such column, or no [MASK], is compared with the entropies
    that it states.  None for what a run does not have.
    """
    if not len(run.evals):
        return None, None
    row = run.evals.iloc[[-1]]
    stated = run.columns.get("references", {})
    loss = last_row(row, ["loss_masked"])
    if loss is not None:
        floor = last_row(row, ["unigram_loss"]) or stated.get("unigram_entropy")
    else:
        loss = last_row(row, ["loss"])
        floor = stated.get("context_free_entropy") or stated.get("uniform_entropy")
    return loss, None if floor is None else float(floor)


def outcome(run: Run) -> str | None:
    """One of OUTCOMES for a run that came to its end, None for one that did not."""
    if run.state == "diverged":
        return "diverged"
    difference = margin(run) if run.state == "done" else None
    if difference is None:
        return None
    if difference < -CLEAR:
        return "trained"
    return "stalled" if difference <= CLEAR else "above"


class Place(NamedTuple):
    """Where a run stands in a map: its panel's name, its row's, and what panels are sorted by."""

    panel: str
    row: str
    order: tuple[tuple[bool, float, str], ...]


@dataclass(frozen=True)
class Cell:
    """The seeds of one cell: their outcomes, and their distances from the unigram in nats.

    A seed that diverged has no distance: its last evaluation was before it did.
    """

    outcomes: tuple[str, ...]
    margins: tuple[float | None, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many seeds have each outcome, in the order of OUTCOMES; zeros left out."""
        found = Counter(self.outcomes)
        return {name: found[name] for name in OUTCOMES if found[name]}

    @property
    def all_trained(self) -> bool:
        return set(self.outcomes) == {"trained"}


def cell_of(runs: Sequence[Run]) -> Cell:
    """The cell of runs that have an outcome each."""
    runs = one_a_seed(runs)
    return Cell(
        tuple(outcome(run) or "" for run in runs),
        tuple(margin(run) if run.state == "done" else None for run in runs),
    )


def judged(runs: Sequence[Run]) -> list[Run]:
    """The runs that have an outcome. Raises NothingMatchedError when there is none."""
    found = [run for run in runs if outcome(run)]
    if not found:
        raise NothingMatchedError(
            "no finished run has a validation loss that can be compared with a unigram's"
        )
    return found


def places(runs: Sequence[Run], but: Sequence[str] = ()) -> dict[str, Place]:
    """Panel and row of each run, by its name.

    A row is a scheme, and its options where it has several.  A panel is what else varies besides
    depth, seed and the keys in `but`, and does not follow from scheme, depth and these: a learning
    rate that was chosen for each scheme makes no panel.  A task, or other data, always does.
    """
    import pandas as pd

    names = [key for key in differing(runs) if key not in (SCHEME, *but)]
    keys = [DEPTH, SCHEME, *but, *names]
    frame = pd.DataFrame([[repr(setting(run, k)) for k in keys] for run in runs])
    frame.columns = pd.Index(keys)
    options = [key for key in names if key.startswith(OPTION)]
    given = [DEPTH, SCHEME, *but, *options]
    for key in names:
        varies = frame.groupby(given)[key].nunique().max() > 1
        if key not in options and (varies or key in (TASK, DATA)):
            given.append(key)
    panels = [key for key in given if key in names and key not in options]
    told = {key: owners_told(key, runs) for key in options}

    found = {}
    for run in runs:
        own = [key for key in options if run.get(SCHEME) in told[key]]
        found[str(run.path)] = Place(
            ", ".join(value_said(run, key) for key in panels),
            ", ".join([scheme_label(run), *(value_said(run, key) for key in own)]),
            tuple(_order(setting(run, key)) for key in panels),
        )
    return found


def _order(value: object) -> tuple[bool, float, str]:
    """Numbers by size, and before everything else."""
    if isinstance(value, int | float):
        return (False, float(value), "")
    return (True, 0.0, str(value))


def draw_cell(axes: Axes, x: float, y: float, cell: Cell) -> None:
    """A box around (x, y), divided among the outcomes of its seeds."""
    left, width = x - 0.5 + GAP / 2, 1 - GAP
    for name, count in cell.counts.items():
        share = width * count / len(cell.outcomes)
        box = Rectangle(
            (left, y - 0.5 + GAP), share, 1 - 2 * GAP, color=OUTCOMES[name], lw=0, zorder=2
        )
        axes.add_patch(box)
        left += share


def map_axes(axes: Axes, columns: Sequence[str], rows: Sequence[str], width: float) -> None:
    """Categories along both axes, the first row on top; width: inches of a panel and its names.

    Names of columns that have no room beside each other stand upright.
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
    found = {name for cell in cells for name in cell.counts}
    return [Patch(color=OUTCOMES[name], lw=0, label=name) for name in OUTCOMES if name in found]


def add_rows(table: Table, cell: Cell, **where: object) -> None:
    """A row for each outcome in a cell: its n seeds, and their mean distance from the unigram."""
    for name, count in cell.counts.items():
        both = zip(cell.outcomes, cell.margins, strict=True)
        margins = [m for o, m in both if o == name and m is not None]
        mean = sum(margins) / len(margins) if margins else math.nan
        table.add(kind=name, n=count, value=mean, **where)


def map_notes(runs: Sequence[Run], shown: Sequence[Run], cells: Sequence[Cell]) -> list[str]:
    """The criterion, what a box is, and what is left out: for a map's caption."""
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
    shown = judged(runs)
    where = places(shown)
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
    found: dict[str, list[str]] = {}
    for (_, row, _), cell in cells.items():
        found.setdefault(row, []).extend(cell.outcomes)

    def place(row: str) -> tuple[float, float, str]:
        names = found[row]
        return (
            -names.count("trained") / len(names),
            names.count("diverged") / len(names),
            row.lower(),
        )

    return sorted(found, key=place)
