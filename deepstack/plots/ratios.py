"""Ratios of gradients by layer and kind of sublayer: through the norm, over the sum, and both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from deepstack.analysis.captions import diverged_note
from deepstack.analysis.tidy import array_statistics
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.drawing import Drawing
from deepstack.plots.layers import sides_note
from deepstack.plots.page import typeset
from deepstack.plots.panel import Panel, markers
from deepstack.plots.style import COLOURS, DASHES, GREY, layer_axis
from deepstack.records import Run

MOST_SETTINGS = 4
KINDS = {
    "attention": "attention",
    "cross_attention": "cross-attention",
    "feed_forward": "feed-forward",
}
KIND_COLOURS = dict(zip(KINDS, COLOURS, strict=False))
WORDS = {"β_LN": "through the norm", "β_RC": "over the sum", "β_LN·β_RC": "both"}
SYMBOLS = {"β_LN": "β_{LN}", "β_RC": "β_{RC}", "β_LN·β_RC": "β_{LN}·β_{RC}"}
# Reported for Post-LN by Zhang et al. 2019, arXiv:1908.11365, section 3.
PUBLISHED = {"β_LN": (0.82, 0.86), "β_RC": (1.10, 1.22)}


@dataclass(frozen=True)
class Ratios:
    """One quantity of one kind of sublayer: (seeds, records, layers), NaN where not finite."""

    steps: np.ndarray
    values: np.ndarray

    def rows(self, record: int) -> pd.DataFrame:
        """Mean and deviation over the seeds (x, y, low, high, n) of the layers that all have."""
        layers = np.arange(1, self.values.shape[2] + 1)
        return array_statistics(layers, self.values[:, record]).query("y > 0")


def read(members: Sequence[Run], name: str) -> Ratios | None:
    """A diagnostic of all seeds, at the records that they share; None where one lacks it."""
    if not all(name in run.layer_names() for run in members):
        return None
    diagnostics = [run.layers(name) for run in members]
    shared = sorted(set.intersection(*(set(steps.tolist()) for steps, _ in diagnostics)))
    values = np.array([v[np.isin(steps, shared)] for steps, v in diagnostics], dtype=float)
    values[~np.isfinite(values)] = np.nan
    return Ratios(np.array(shared), values) if (values > 0).any() else None


def read_kinds(members: Sequence[Run]) -> dict[tuple[str, str], Ratios]:
    """Return what these seeds have, by symbol and kind of sublayer."""
    ratios: dict[tuple[str, str], Ratios] = {}
    for kind in KINDS:
        ln, rc = (read(members, f"{name}_{kind}") for name in ("beta_ln", "beta_rc"))
        product = Ratios(ln.steps, ln.values * rc.values) if ln and rc else None
        every = zip(WORDS, (ln, rc, product), strict=True)
        ratios |= {(symbol, kind): each for symbol, each in every if each is not None}
    return ratios


@chart("gradient_ratios")
def gradient_ratios(runs: list[Run], *, options: Options) -> Chart:
    """Ratios β_LN, β_RC and their product by layer and sublayer, at the first and last record."""
    usable = [run for run in runs if "beta_ln_feed_forward" in run.layer_names()]
    if not usable:
        raise NothingMatchedError("no run has the per-layer diagnostics beta_ln and beta_rc")
    drawing = Drawing(usable, options)
    cells = drawing.cells(MOST_SETTINGS)
    ratios = [read_kinds(cell.runs) for cell in cells]
    if not any(ratios):
        raise NothingMatchedError("β_LN and β_RC: no value is finite")
    rows = list(product(range(len(cells)), WORDS))
    names = [": ".join(filter(None, [cells[i].name, symbol])) for i, symbol in rows]
    titles = [cells[i].name or typeset(SYMBOLS[symbol]) for i, symbol in rows]
    layout: Any = {"titles": titles, "columns": len(WORDS), "height": 1.25}
    for panel, (i, symbol) in drawing.fill(names, rows, **layout):
        draw_published(panel, symbol)
        draw_ratios(panel, symbol, ratios[i], cells[i].runs)
    for column, symbol in enumerate(WORDS):
        label = f"{typeset(SYMBOLS[symbol])}, {WORDS[symbol]}"
        drawing.value_axis(label, drawing.panels[column :: len(WORDS)], log=True)
    drawing.notes += sides_note(usable)
    drawing.note("layers whose gradient is 0 have no ratio")
    drawing.notes += diverged_note((cell.label, cell.runs) for cell in cells)
    for kind, words in KINDS.items():
        if any(kind == known for each in ratios for _, known in each):
            drawing.entry(words, color=KIND_COLOURS[kind])
    drawing.entry("first snapshot", color=GREY, ls="-")
    drawing.entry("last snapshot", color=GREY, ls=DASHES[1])
    if len(drawing.rows("predicted")):
        drawing.entry("first snapshot: 1/sqrt(α² + Var G)", color=GREY, ls=DASHES[2], lw=0.7)
    drawing.entry("published for Post-LN", patch=True, color=GREY, alpha=0.18, lw=0)
    return drawing.finish("Gradient ratios by layer")


def draw_ratios(
    panel: Panel, symbol: str, ratios: dict[tuple[str, str], Ratios], members: Sequence[Run]
) -> None:
    """Draw one ratio of each kind of sublayer, and the prediction; broken where a stack ends."""
    if not ratios:
        return
    first = members[0].columns.get("stacks", {}).get("encoder", 0)
    layer_axis(panel.axes, next(iter(ratios.values())).values.shape[2], ticks=4)
    for kind, colour in KIND_COLOURS.items():
        each = ratios.get((symbol, kind))
        if each is None:
            continue
        lines = [
            (f"step {int(each.steps[record])}", each.rows(record), {"ls": dash, "lw": 1.1})
            for record, dash in zip(sorted({0, len(each.steps) - 1}), DASHES, strict=False)
        ]
        expected = read(members, f"beta_ln_predicted_{kind}") if symbol == "β_LN" else None
        if expected is not None:
            lines.append(("predicted", expected.rows(0), {"ls": DASHES[2], "lw": 0.7}))
        for name, rows, look in lines:
            style: Any = look | {"color": colour, "ms": 1.8, "marker": markers(len(rows))}
            style |= {"kind": "predicted", "band": False} if name == "predicted" else {}
            for part in (rows[rows["x"] <= first], rows[rows["x"] > first]):
                panel.lines(f"{KINDS[kind]}, {name}", part, **style)


def draw_published(panel: Panel, symbol: str) -> None:
    """The published range as a band, and the line at 1 that says growing or vanishing."""
    panel.axes.axhline(1.0, color=GREY, lw=0.6, zorder=1)
    panel.add(pd.DataFrame({"y": [1.0]}), series="neither grows nor vanishes", kind="level")
    if symbol in PUBLISHED:
        low, high = PUBLISHED[symbol]
        panel.axes.axhspan(low, high, color=GREY, alpha=0.18, lw=0)
        panel.add(pd.DataFrame({"y": [low, high]}), series="published", kind="reference")
