"""The coordinate check: size and change of the stream by layer, over width or depth."""

from __future__ import annotations

from typing import Any

from matplotlib.lines import Line2D

from deepstack.analysis.coordinates import (
    LAYERS,
    OF_WIDTH,
    TOLERANCE,
    WIDTH,
    coordinate_slopes,
    coordinates,
    slope_text,
    swept,
)
from deepstack.analysis.settings import choose_series
from deepstack.analysis.tidy import seed_statistics
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.drawing import Drawing, points, published
from deepstack.plots.page import typeset
from deepstack.plots.style import DASHES, GREY, MARKERS, depth_axis, shade
from deepstack.records import Run

MOST_PANELS = 3
SYMBOLS = {"update": "‖x_{l,t} − x_{l,0}‖/√d", "size": "‖x_{l,t}‖/√d"}
LINE_STYLES = {"first": DASHES[2], "middle": DASHES[1], "last": "-", "F": "-"}


@chart("coordinate_check")
def coordinate_check(runs: list[Run], *, options: Options) -> Chart:
    """Size of a coordinate of the stream and of its change, by layer, over width or depth."""
    drawing = Drawing([run for run in runs if int(run.get(WIDTH, 0))], options, but=OF_WIDTH)
    tables = {}
    for s in drawing.series:
        table = coordinates(s.runs, options.at_step)
        if swept(table):
            tables[s.label] = table
    if not tables:
        raise NothingMatchedError("needs runs of two widths (model.d_model) or two depths")
    over = "width" if any("width" in swept(table) for table in tables.values()) else "depth"
    other = "depth" if over == "width" else "width"
    able = [s for s in drawing.series if s.label in tables and over in swept(tables[s.label])]
    shown, notes = choose_series(able, drawing.limit(MOST_PANELS))
    tables = {s.label: tables[s.label] for s in shown}
    quantities = [q for q in SYMBOLS if any((t["quantity"] == q).any() for t in tables.values())]
    cells = [(s.label, quantity) for quantity in quantities for s in shown]
    panels = drawing.add_panels(
        [f"{label}: {quantity}" for label, quantity in cells],
        titles=[label if quantity == quantities[0] else "" for label, quantity in cells],
        columns=len(shown),
        height=1.7,
    )
    values = sorted({int(v) for table in tables.values() for v in table[other]})
    colours = {value: shade(i, len(values)) for i, value in enumerate(values)}
    drawn = set()
    for panel, (label, quantity) in zip(panels, cells, strict=True):
        table = tables[label][tables[label]["quantity"] == quantity]
        layers = [layer for layer in LAYERS if (table["layer"] == layer).any()] or ["F"]
        drawn |= set(layers)
        for value in values:
            for layer in layers:
                chosen = table[(table["layer"] == layer) & (table[other] == value)]
                rows = seed_statistics(chosen, over)
                rows = rows[rows["y"] > 0].assign(mark="")
                style = {
                    "color": colours[value], "linestyle": LINE_STYLES[layer],
                    "marker": MARKERS[list(LINE_STYLES).index(layer)],
                }  # fmt: skip
                points(panel, f"{other} {value}, {layer}", rows, style, bars=True)
        published(panel)
        depth_axis(panel.axes, sorted({int(v) for v in table[over]}))
        if over == "width":
            panel.axes.set_xlabel("width d")
    for quantity in quantities:
        row = [p for p, (_, q) in zip(panels, cells, strict=True) if q == quantity]
        drawing.value_axis(typeset(SYMBOLS[quantity]), row)
    for label, table in tables.items():
        for slope in coordinate_slopes(table, over):
            add_slope(drawing, label, slope, other)
        last = [r for r in coordinate_slopes(table, over) if r["quantity"] == quantities[0]]
        name = "last" if any(r["layer"] == "last" for r in last) else "F"
        texts = [f"{other} {r[other]} {slope_text(r)}" for r in last if r["layer"] == name]
        which = "of F" if name == "F" else "of the last layer"
        notes += [f"{label}, {quantities[0]} {which}: {'; '.join(texts)}"] if texts else []
    steps = sorted({int(step) for table in tables.values() for step in table["step"]})
    limits = f"within ±{TOLERANCE:g}, or without 0"
    words = f"step {' and '.join(map(str, steps))}; verdict by the 95 % interval over seeds"
    notes.insert(0, f"{words}: {limits}")
    handles: list[Any] = [
        Line2D([], [], color=colour, label=f"{other} {value}") for value, colour in colours.items()
    ]
    for layer, dash in LINE_STYLES.items():
        if layer in drawn:
            words = "F" if layer == "F" else f"{layer} layer"
            marker = MARKERS[list(LINE_STYLES).index(layer)]
            handles.append(Line2D([], [], color=GREY, ls=dash, marker=marker, label=words))
    return drawing.finish("Coordinate check", notes, handles)


def add_slope(drawing: Drawing, label: str, slope: dict[str, Any], other: str) -> None:
    """Add the exponent of one line to the table of the chart."""
    drawing.table.add(
        panel=f"{label}: {slope['quantity']}",
        series=f"{other} {slope[other]}, {slope['layer']}",
        kind="fit",
        exponent=slope["exponent"],
        exponent_low=slope["low"],
        exponent_high=slope["high"],
        mark=slope["verdict"],
        seeds=slope["seeds"],
    )
