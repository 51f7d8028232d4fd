"""Variance, correlation of tokens and gradients of every layer before training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from deepstack.analysis.initial_signals import SIGNALS, signal_layers
from deepstack.analysis.settings import choose_series, evenly_spaced
from deepstack.analysis.tidy import seed_statistics
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.drawing import MOST_BANDS, Drawing, axis_label, lines, published
from deepstack.plots.layers import runs_with, sides_note
from deepstack.plots.page import Handle
from deepstack.records import Run

COLUMNS = {
    "variance": "variance",
    "token_distance": "distance",
    "stream_grad": "gradient",
    "grad_norm": "gradient",
}
MOST_SERIES = 10
MOST_DEPTHS = 4
MOST_POINTS = 120  # of a line: a thousand layers need no more


@chart("signal_by_layer")
def signal_by_layer(runs: list[Run], *, options: Options) -> Chart:
    """Variance, distance of tokens and gradients before training against layer/N, by depth."""
    drawing = Drawing(runs_with(runs, SIGNALS["variance"]), options)
    drawing.spread = "geometric mean × or ÷ 1 standard deviation"
    shown, left = choose_series(drawing.series, drawing.limit(MOST_SERIES))
    table = signal_layers(drawing.runs)
    depths = evenly_spaced(sorted({n for s in shown for n in s.depths}), MOST_DEPTHS)
    cells = [(depth, column) for depth in depths for column in COLUMNS]
    panels = drawing.add_panels(
        [f"N = {depth}: {column}" for depth, column in cells],
        titles=[f"N = {depth}" for depth, _ in cells],
        columns=len(COLUMNS),
        height=1.3,
    )
    styles = dict(zip([s.label for s in drawing.series], drawing.styles, strict=True))
    for panel, (depth, column) in zip(panels, cells, strict=True):
        for s in shown:
            here = table[(table["setting"] == s.label) & (table["depth"] == depth)]
            rows = rows_of(here, column)
            style: Any = {key: styles[s.label][key] for key in ("color", "linestyle")}
            lines(panel, s.label, rows, band=len(shown) <= MOST_BANDS, **style)
        panel.axes.set(xlim=(0, 1), xlabel="layer l / N")
        published(panel)
    if drawing.rows("line").empty:
        raise NothingMatchedError("no initial signal is finite and above 0")
    for i, (column, words) in enumerate(COLUMNS.items()):
        label = axis_label(drawing.runs, SIGNALS[column], words, ("layers",))
        drawing.value_axis(label, panels[i :: len(COLUMNS)])
    handles: list[Handle] = [
        Line2D([], [], color=styles[s.label]["color"], ls=styles[s.label]["linestyle"],
               label=s.label)
        for s in shown
    ]  # fmt: skip
    notes = ["before the first step", *left, *sides_note(drawing.runs)]
    return drawing.finish("Signals before training, by layer", notes, handles)


def rows_of(here: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return geometric mean and deviation over seeds at l/N, at MOST_POINTS layers."""
    position = here.groupby("seed").cumcount() + 1
    logs = np.log(here[column].where(here[column] > 0))
    rows = seed_statistics(here.assign(position=position, value=logs), "position")
    rows = rows.iloc[evenly_spaced(range(len(rows)), MOST_POINTS)]
    values = {name: np.exp(rows[name]) for name in ("y", "low", "high")}
    return rows.assign(x=rows["x"] / position.max(), **values)
