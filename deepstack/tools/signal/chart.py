"""Chart of the signals before training, by layer."""

from typing import Any

import numpy as np
import pandas as pd

from deepstack.plots import Chart, Drawing, Options, axis_label, chart, runs_with
from deepstack.runs import Runs, evenly_spaced, require, seed_statistics, sides_note
from deepstack.tools.signal.table import SIGNALS, signal_layers

MOST_SERIES, MOST_DEPTHS = 10, 4  # of the signals before training
MOST_POINTS = 120  # of a line: a thousand layers need no more
COLUMNS = {
    "variance": "variance",
    "token_distance": "distance",
    "stream_grad": "gradient",
    "grad_norm": "gradient",
}


@chart("signal_by_layer")
def signal_by_layer(runs: Runs, *, options: Options) -> Chart:
    """Variance, distance of tokens and gradients before training against layer/N, by depth."""
    drawing = Drawing(runs_with(runs, SIGNALS["variance"]), options)
    drawing.legend.spread = "geometric mean × or ÷ 1 standard deviation"
    shown = [group.series[0] for group in drawing.groups("series", MOST_SERIES)]
    table = signal_layers(drawing.runs)
    depths = evenly_spaced(sorted({n for s in shown for n in s.depths}), MOST_DEPTHS)
    cells = [(depth, column) for depth in depths for column in COLUMNS]
    names = [f"N = {depth}: {column}" for depth, column in cells]
    titles = [f"N = {depth}" for depth, _ in cells]
    layout: Any = {"titles": titles, "columns": len(COLUMNS), "height": 1.3}
    styles = {s: drawing.curve_style(s, s.depths[-1], len(shown)) for s in shown}
    for panel, (depth, column) in drawing.arrange(cells, names, **layout):
        for i, (s, style) in enumerate(styles.items()):
            here = table[(table["setting"] == s.label) & (table["depth"] == depth)]
            rows = signal_rows(here, column)
            panel.lines(s.label, rows, place=(i, len(shown)), **style)
        panel.axes.set(xlim=(0, 1), xlabel="layer l / N")
    require(not drawing.rows("line").empty, "no initial signal is finite and above 0")
    for i, (column, words) in enumerate(COLUMNS.items()):
        label = axis_label(drawing.runs, SIGNALS[column], words, ("layers",))
        drawing.value_axis(label, drawing.panels[i :: len(COLUMNS)], log=True)
    for s, style in styles.items():
        drawing.entry(s.label, **style)
    drawing.notes += ["before the first step", *sides_note(drawing.runs)]
    return drawing.finish("Signals before training, by layer")


def signal_rows(here: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return geometric mean and deviation over seeds at l/N, at MOST_POINTS layers."""
    position = here.groupby("seed").cumcount() + 1
    logs = np.log(here[column].where(here[column] > 0))
    rows = seed_statistics(here.assign(position=position, value=logs), "position")
    rows = rows.iloc[evenly_spaced(range(len(rows)), MOST_POINTS)]
    values = {name: np.exp(rows[name]) for name in ("y", "low", "high")}
    return rows.assign(x=rows["x"] / position.max(), **values)
