"""The coordinate check: size and change of the stream by layer, over width or depth."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pandas as pd

from deepstack.plots import (
    DASHES,
    GREY,
    MARKERS,
    Chart,
    Drawing,
    Options,
    chart,
    depth_axis,
    shades,
    typeset,
)
from deepstack.runs import WIDTH, Runs, require, seed_statistics
from deepstack.tools.coordinates.table import (
    LAYERS,
    OF_WIDTH,
    TOLERANCE,
    coordinate_slopes,
    coordinates,
    slope_text,
    swept,
)

MOST_PANELS = 3
SYMBOLS = {"update": "‖x_{l,t} − x_{l,0}‖/√d", "size": "‖x_{l,t}‖/√d"}
LINE_STYLES: dict[str, dict[str, Any]] = {
    layer: {"linestyle": dash, "marker": marker}
    for layer, dash, marker in zip(
        (*LAYERS, "F"), (DASHES[2], DASHES[1], "-", "-"), MARKERS, strict=False
    )
}


@chart("coordinate_check")
def coordinate_check(runs: Runs, *, options: Options) -> Chart:
    """Size of a coordinate of the stream and of its change, by layer, over width or depth."""
    drawing = Drawing(runs.keep(lambda run: int(run.get(WIDTH, 0))), options, but=OF_WIDTH)
    tables = {s: coordinates(s.runs, options.at_step) for s in drawing.series}
    axes_swept = {axis for table in tables.values() for axis in swept(table)}
    require(axes_swept, "needs runs of two widths (model.d_model) or two depths")
    over, other = ("width", "depth") if "width" in axes_swept else ("depth", "width")
    able = [s for s, table in tables.items() if over in swept(table)]
    shown = [group.series[0] for group in drawing.groups("series", MOST_PANELS, series=able)]
    everything = pd.concat([tables[s] for s in shown])
    sizes = sorted(everything[other].unique())
    colours = dict(sorted(shades(sizes[::-1]).items()))  # dark for deep
    quantities = [quantity for quantity in SYMBOLS if quantity in set(everything["quantity"])]
    cells = [(s, quantity) for quantity in quantities for s in shown]
    names = [f"{s.label}: {quantity}" for s, quantity in cells]
    titles = [s.label if quantity == quantities[0] else "" for s, quantity in cells]
    layout: Any = {"titles": titles, "columns": len(shown), "height": 1.7}
    drawn = set()
    for panel, (s, quantity) in drawing.arrange(cells, names, **layout):
        table = tables[s][tables[s]["quantity"] == quantity]
        layers = layers_of(table)
        drawn |= set(layers)
        for value, layer in product(colours, layers):
            chosen = table[(table["layer"] == layer) & (table[other] == value)]
            rows = seed_statistics(chosen, over)
            rows = drawing.above_zero(rows).assign(mark="")
            style = {"color": colours[value]} | LINE_STYLES[layer]
            panel.points(f"{other} {value}, {layer}", rows, style)
        depth_axis(panel.axes, table[over].tolist())
        if over == "width":
            panel.axes.set_xlabel("width d")
    for i, quantity in enumerate(quantities):
        row = drawing.panels[i * len(shown) : (i + 1) * len(shown)]
        drawing.value_axis(typeset(SYMBOLS[quantity]), row, log=True)
    steps = " and ".join(map(str, sorted(everything["step"].unique())))
    at = f"step {steps}; verdict by the 95 % interval over seeds"
    drawing.note(f"{at}: within ±{TOLERANCE:g}, or without 0")
    for s in shown:
        slopes = coordinate_slopes(tables[s], over)
        write_slopes(drawing, s.label, slopes, other)
        note_slopes(drawing, s.label, [r for r in slopes if r["quantity"] == quantities[0]], other)
    for value, colour in colours.items():
        drawing.entry(f"{other} {value}", color=colour)
    for layer, style in LINE_STYLES.items():
        if layer in drawn:
            drawing.entry("F" if layer == "F" else f"{layer} layer", color=GREY, **style)
    return drawing.finish("Coordinate check")


def layers_of(table: pd.DataFrame) -> list[str]:
    """Return which layers a table has, or F where it has none."""
    return [layer for layer in LAYERS if layer in set(table["layer"])] or ["F"]


def write_slopes(
    drawing: Drawing, label: str, slopes: Sequence[dict[str, Any]], other: str
) -> None:
    """Add the exponents of a series to the CSV; other: width or depth, constant along a line."""
    for slope in slopes:
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


def note_slopes(drawing: Drawing, label: str, slopes: Sequence[dict[str, Any]], other: str) -> None:
    """Add the exponents of the last layer to the notes, or of F; slopes: of one quantity."""
    name = "last" if any(slope["layer"] == "last" for slope in slopes) else "F"
    shown = [slope for slope in slopes if slope["layer"] == name]
    if shown:
        texts = [f"{other} {slope[other]} {slope_text(slope)}" for slope in shown]
        which = "of F" if name == "F" else "of the last layer"
        drawing.note(f"{label}, {shown[0]['quantity']} {which}: {'; '.join(texts)}")
