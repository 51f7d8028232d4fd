"""The coordinate check: size and change of the stream by layer, over width or depth."""

from typing import Any

from deepstack.analysis.coordinates import (
    LAYERS,
    OF_WIDTH,
    TOLERANCE,
    coordinate_slopes,
    coordinates,
    slope_text,
    swept,
)
from deepstack.analysis.settings import WIDTH, require
from deepstack.analysis.tidy import seed_statistics
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.drawing import Drawing
from deepstack.plots.page import typeset
from deepstack.plots.style import DASHES, GREY, MARKERS, depth_axis, shades
from deepstack.records import Run

MOST_PANELS = 3
SYMBOLS = {"update": "‖x_{l,t} − x_{l,0}‖/√d", "size": "‖x_{l,t}‖/√d"}
LINE_STYLES: dict[str, dict[str, Any]] = {
    layer: {"linestyle": dash, "marker": marker}
    for layer, dash, marker in zip(
        (*LAYERS, "F"), (DASHES[2], DASHES[1], "-", "-"), MARKERS, strict=False
    )
}


@chart("coordinate_check")
def coordinate_check(runs: list[Run], *, options: Options) -> Chart:
    """Size of a coordinate of the stream and of its change, by layer, over width or depth."""
    drawing = Drawing([run for run in runs if int(run.get(WIDTH, 0))], options, but=OF_WIDTH)
    tables = {}
    for s in drawing.series:
        table = coordinates(s.runs, options.at_step)
        if swept(table):
            tables[s.label] = table
    require(tables, "needs runs of two widths (model.d_model) or two depths")
    over = "width" if any("width" in swept(table) for table in tables.values()) else "depth"
    other = "depth" if over == "width" else "width"
    able = [s for s in drawing.series if s.label in tables and over in swept(tables[s.label])]
    shown = [group.series[0] for group in drawing.setting_groups(MOST_PANELS, able)]
    tables = {s.label: tables[s.label] for s in shown}
    quantities = [q for q in SYMBOLS if any((t["quantity"] == q).any() for t in tables.values())]
    cells = [(s.label, quantity) for quantity in quantities for s in shown]
    names = [f"{label}: {quantity}" for label, quantity in cells]
    titles = [label if quantity == quantities[0] else "" for label, quantity in cells]
    colours = shades(sorted({int(v) for table in tables.values() for v in table[other]}))
    layout: Any = {"titles": titles, "columns": len(shown), "height": 1.7}
    drawn = set()
    for panel, (label, quantity) in drawing.fill(names, cells, **layout):
        table = tables[label][tables[label]["quantity"] == quantity]
        layers = [layer for layer in LAYERS if (table["layer"] == layer).any()] or ["F"]
        drawn |= set(layers)
        for value, colour in colours.items():
            for layer in layers:
                chosen = table[(table["layer"] == layer) & (table[other] == value)]
                rows = seed_statistics(chosen, over)
                rows = rows[rows["y"] > 0].assign(mark="")
                style = {"color": colour} | LINE_STYLES[layer]
                panel.points(f"{other} {value}, {layer}", rows, style)
        depth_axis(panel.axes, sorted({int(v) for v in table[over]}))
        if over == "width":
            panel.axes.set_xlabel("width d")
    for i, quantity in enumerate(quantities):
        row = drawing.panels[i * len(shown) : (i + 1) * len(shown)]
        drawing.value_axis(typeset(SYMBOLS[quantity]), row, log=True)
    steps = sorted({int(step) for table in tables.values() for step in table["step"]})
    at = f"step {' and '.join(map(str, steps))}; verdict by the 95 % interval over seeds"
    drawing.notes += [f"{at}: within ±{TOLERANCE:g}, or without 0"]
    for label, table in tables.items():
        slopes = coordinate_slopes(table, over)
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
        last = [r for r in slopes if r["quantity"] == quantities[0]]
        name = "last" if any(r["layer"] == "last" for r in last) else "F"
        texts = [f"{other} {r[other]} {slope_text(r)}" for r in last if r["layer"] == name]
        which = "of F" if name == "F" else "of the last layer"
        drawing.note(f"{label}, {quantities[0]} {which}: {'; '.join(texts)}", when=texts)
    for value, colour in colours.items():
        drawing.entry(f"{other} {value}", color=colour)
    for layer, style in LINE_STYLES.items():
        if layer in drawn:
            drawing.entry("F" if layer == "F" else f"{layer} layer", color=GREY, **style)
    return drawing.finish("Coordinate check")
