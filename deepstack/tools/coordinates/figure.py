"""The figure of a coordinate check: a line for each module, over width and over depth."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepstack.plots import (
    COLOURS,
    COLUMN_WIDTH,
    GREY,
    PAGE_WIDTH,
    Chart,
    Page,
    Table,
    axis_limits,
    deepstack_style,
    log_axis,
    tried_axis,
    untypeset,
)
from deepstack.tools.coordinates.exponent_fits import Exponent, along
from deepstack.tools.coordinates.result import Break, CoordinateCheck, shown
from deepstack.tools.coordinates.rules import RULES

KEEPS, BREAKS, FIRST = COLOURS[5], COLOURS[4], COLOURS[1]
STYLES: dict[str, dict[str, Any]] = {
    "keeps the rule": {"color": KEEPS, "lw": 0.8, "marker": "o", "ms": 2, "zorder": 2},
    "breaks it": {"color": BREAKS, "lw": 0.9, "marker": "s", "ms": 2.5, "zorder": 3},
    "first": {"color": FIRST, "lw": 2.0, "marker": "D", "ms": 4, "zorder": 4},
}


def draw(check: CoordinateCheck) -> Chart:
    """Return the chart of a check: a panel for width and one for depth, where there are several.

    A line is a size over its value at the least width, divided by the allowed power of width, or
    the same in depth: a line of a right model is flat.
    """
    with deepstack_style():
        return _draw(check)


def _draw(check: CoordinateCheck) -> Chart:
    axes_ = [over for over in ("width", "depth") if len(getattr(check, f"{over}s")) > 1]
    page = Page(1, len(axes_), height=2.1, width=PAGE_WIDTH if len(axes_) > 1 else COLUMN_WIDTH)
    table, used = Table(), set()
    highest: list[float] = []
    for over, axes in zip(axes_, page.axes, strict=True):
        sizes = check.widths if over == "width" else check.depths
        x = np.array(sizes, float)
        ends = (x / x[0]) ** check.tolerance
        axes.fill_between(x, 1 / ends, ends, color="#EDEDED", lw=0, zorder=1)
        highest += [*ends, *(1 / ends)]
        for module in check.modules:
            row, kind = shown_row(check, module.name, over)
            if row is None:
                continue
            y = line(check, row, x)
            axes.plot(x, y, **STYLES[kind])
            used.add(kind)
            highest += list(y)
            add_rows(table, row, kind, x, y, len(check.seeds))
        words = {"width": "width d", "depth": "depth N (layers)"}[over]
        tried_axis(axes, sizes, str, words)
    for axes in page.axes:
        log_axis(axes, "y", *axis_limits(highest))
        label(axes)
    first = check.first
    names = {"first": f"first: {shown(first.module)}" if first else ""}
    handles: list[Any] = [
        Line2D([], [], label=names.get(kind, kind), **style)
        for kind, style in STYLES.items()
        if kind in used
    ]
    handles.append(Patch(color="#EDEDED", lw=0, label=f"exponents within {check.tolerance:g}"))
    verb = "keeps" if check.holds else "breaks"
    title = f"{check.name} {verb} {RULES[check.rule]}"
    counts = "{holds} exponents within the tolerance, {undecided} undecided".format(**check.counts)
    subtitle = f"{first.found}; usual cause: {first.cause}" if first else counts
    caption = [
        f"a line for each module: its change after {check.steps[-1]} steps, or the quantity that "
        "breaks the rule",
        "geometric mean over the value at the least size, divided by the allowed power",
        f"{len(check.seeds)} seeds",
    ]
    figure = page.finish(title, subtitle, caption, handles)
    text = untypeset("\n".join([f"{title}. {subtitle}.", *caption, ""]).replace("\u00a0", " "))
    return Chart(figure, table.frame(), title, text)


def shown_row(check: CoordinateCheck, name: str, over: str) -> tuple[Exponent | None, str]:
    """Return the exponent that the figure shows of a module, and the kind of its line."""
    found: Break | None = next(
        (one for one in check.broken if (one.module, one.over) == (name, over)), None
    )
    if found is not None:
        return found.row, "first" if found is check.first else "breaks it"
    rows = [row for row in check.rows if (row.module, row.over) == (name, over)]
    for quantity in ("change", "size"):
        judged = [row for row in rows if row.quantity == quantity and row.verdict]
        if judged:
            return judged[-1], "keeps the rule"
    return None, ""


def line(check: CoordinateCheck, row: Exponent, x: np.ndarray) -> np.ndarray:
    """Return the geometric means over seeds, over the first one and the allowed power."""
    table = along(check.values, row.over)
    columns = ["module", "quantity", "step"]
    chosen = table[(table[columns] == [row.module, row.quantity, row.step]).all(axis=1)]
    means = np.log(chosen["value"]).groupby(chosen[row.over]).mean().to_numpy()
    power = (row.exponent or 0.0) - row.excess
    return np.asarray(np.exp(means - means[0]) / (x / x[0]) ** power)


def add_rows(
    table: Table, row: Exponent, kind: str, x: np.ndarray, y: np.ndarray, seeds: int
) -> None:
    """Add the points of a line, and its exponent, to the chart's table."""
    after = f" after {row.step}" if row.step else ""
    series = f"{shown(row.module)}: {row.quantity}{after}"
    for one, value in zip(x, y, strict=True):
        table.add(panel=row.over, series=series, kind="point", x=one, y=value, n=seeds, mark=kind)
    table.add(
        panel=row.over,
        series=series,
        kind="fit",
        exponent=row.exponent,
        exponent_low=row.low,
        exponent_high=row.high,
        seeds=seeds,
        mark=row.verdict,
    )


def label(axes: Axes) -> None:
    """Label the axis of values, and draw the line of a module that grows as allowed."""
    axes.axhline(1, color=GREY, lw=0.6, zorder=1.5)
    axes.set_ylabel("growth beyond the rule")
