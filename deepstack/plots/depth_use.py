"""The contribution of each layer of a trained stack: results of `deepstack analyze`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.collections import QuadMesh
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D

from deepstack.analysis.outcomes import outcome
from deepstack.analysis.settings import SEED, choose_panels, choose_series, depths_of, evenly_spaced
from deepstack.analysis.statistics import points_of
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.drawing import (
    AT_CHANCE,
    MOST_BANDS,
    Drawing,
    Panel,
    heat_map,
    lines,
    points,
    published,
)
from deepstack.plots.page import Handle, typeset
from deepstack.plots.style import DASHES, GREY, depth_axis, shade
from deepstack.records import Analysis, Run

MOST_PANELS = 6
MOST_LINES = 10
MOST_CELLS = 32
MARKERS = 8  # of a line
ALL_LAYERS = "all layers"


def analyses_of(runs: Sequence[Run], name: str) -> dict[Run, Analysis]:
    """Return the runs that have an analysis.  Raises NothingMatchedError when there is none."""
    analyses = {}
    for run in runs:
        with contextlib.suppress(KeyError):
            analyses[run] = run.analysis(name)
    if not analyses:
        raise NothingMatchedError(f"no run has it: deepstack analyze RUN --what {name} measures it")
    return analyses


def seed_rows(x: np.ndarray, values: Sequence[np.ndarray]) -> pd.DataFrame:
    """Return x, mean, deviation and number of seeds (x, y, low, high, n); values: one per seed."""
    each = np.stack(values).astype(float)
    mean, n = each.mean(axis=0), len(each)
    deviation = each.std(axis=0, ddof=1) if n > 1 else np.full_like(mean, np.nan)
    columns = {"x": x, "y": mean, "low": mean - deviation, "high": mean + deviation, "n": n}
    return pd.DataFrame(columns)


@chart("lens_by_layer")
def lens_by_layer(runs: list[Run], *, options: Options) -> Chart:
    """KL to the final output and loss, read by the head after each layer, over the seeds."""
    analyses = analyses_of(runs, "lens")
    drawing = Drawing(list(analyses), options)
    shown, notes = choose_panels(drawing.series, drawing.limit(MOST_LINES))
    keys = {"KL to the final output": "kl", "loss": "loss"}
    panels = drawing.add_panels(list(keys), height=1.9)
    handles: list[Handle] = []
    for i, (label, members) in enumerate(shown):
        style = {"color": shade(i, len(shown)), "marker": "o"}
        for s, line in zip(drawing.series, drawing.styles, strict=True):
            if len(drawing.series) > 1 and members[0] in s.runs:
                style = line
        for panel in panels:
            values = [analyses[run].arrays[keys[str(panel.name)]] for run in members]
            x = np.arange(len(values[0])) / (len(values[0]) - 1)
            rows = seed_rows(x, values)
            some: Any = {"markevery": max(1, len(x) // MARKERS), "ms": 2.5, "lw": 0.9}
            lines(panel, label, rows, band=len(shown) <= MOST_BANDS, **style, **some)
        handles.append(Line2D([], [], label=label, **style))
    for panel, label in zip(panels, (typeset("KL(p_l ‖ p_N) (nats)"), "loss (nats)"), strict=True):
        drawing.value_axis(label, [panel], log=panel is panels[0])
        panel.axes.set(xlim=(-0.02, 1.02), xlabel="layer l / N")
        published(panel)
    notes.append("l = 0: the embedding")
    return drawing.finish("Prediction read after each layer", notes, handles)


@chart("effects")
def effects(runs: list[Run], *, options: Options) -> Chart:
    """Relative change of the contribution of each later layer when a layer is removed."""
    analyses = analyses_of(runs, "effects")
    drawing = Drawing(list(analyses), options)
    shown, notes = choose_panels(drawing.series, drawing.limit(MOST_PANELS))
    drawing.add_panels([label for label, _ in shown])
    for panel, (_, (run, *_)) in zip(drawing.panels, shown, strict=True):
        arrays = analyses[run].arrays
        removed, layers = arrays["removed"], np.arange(1, arrays["effect_mean"].shape[1] + 1)
        mesh, thinned = pair_map(panel, removed, layers, arrays["effect_mean"])
        panel.axes.set(xlabel="removed layer s", ylabel="later layer l")
        notes += thinned
    bar = drawing.page.colour_bar(mesh, "relative change of its contribution")
    bar.grid(False)
    notes = [
        *dict.fromkeys(notes),
        one_seed_note(shown),
        "grey: not a later layer; above 1 drawn as 1",
    ]
    return drawing.finish("Effect of removing a layer on later layers", notes)


@chart("layer_similarity")
def layer_similarity(runs: list[Run], *, options: Options) -> Chart:
    """Linear CKA of the streams after any two layers, 0 being the embedding."""
    analyses = analyses_of(runs, "similarity")
    drawing = Drawing(list(analyses), options)
    shown, notes = choose_panels(drawing.series, drawing.limit(MOST_PANELS))
    drawing.add_panels([label for label, _ in shown])
    for panel, (_, (run, *_)) in zip(drawing.panels, shown, strict=True):
        arrays = analyses[run].arrays
        mesh, thinned = pair_map(panel, arrays["layers"], arrays["layers"], arrays["cka"])
        panel.axes.set(xlabel="layer l", ylabel="layer m")
        notes += thinned
    bar = drawing.page.colour_bar(mesh, "linear CKA")
    bar.grid(False)
    notes = [*dict.fromkeys(notes), one_seed_note(shown)]
    return drawing.finish("Similarity of the stream after two layers", notes)


def pair_map(
    panel: Panel, columns: np.ndarray, rows: np.ndarray, values: np.ndarray
) -> tuple[QuadMesh, list[str]]:
    """Draw values (columns, rows) from 0 to 1, at most MOST_CELLS each way, and a note if so."""
    x, y = (evenly_spaced(range(len(each)), MOST_CELLS) for each in (columns, rows))
    mesh = heat_map(panel, columns[x], values[np.ix_(x, y)], Normalize(0, 1), rows=rows[y])
    is_thinned = len(x) < len(columns) or len(y) < len(rows)
    return mesh, [f"at most {MOST_CELLS} layers are drawn, evenly spaced"] if is_thinned else []


def one_seed_note(shown: Sequence[tuple[str, list[Run]]]) -> str:
    """Return a note that names the seed of each panel."""
    seeds = sorted({int(members[0].get(SEED, 0)) for _, members in shown})
    return f"seed {', '.join(map(str, seeds))}"


@chart("effective_depth_vs_depth")
def effective_depth_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """Effective depth and its share of the depth against depth, mean over seeds."""
    analyses = analyses_of(runs, "lens")
    used = list(analyses)
    depths = depths_of(used)
    drawing = Drawing(used, options)
    shown, left = choose_series(drawing.series, drawing.limit(MOST_LINES))
    keys = {"layers": "effective_depth", "share of the depth": "effective_depth_ratio"}
    panels = drawing.add_panels(list(keys), height=1.9)
    handles: list[Handle] = []
    for s, style in zip(drawing.series, drawing.styles, strict=True):
        if s not in shown:
            continue
        for panel in panels:
            key = keys[str(panel.name)]
            rows = points_of(s.by_depth, lambda run, key=key: analyses[run].scalars[key])  # type: ignore[misc]
            learnt = {n: {outcome(run) for run in s.at(int(n))} for n in rows["x"]}
            stalled = [not learnt[n] & {"trained", None} for n in rows["x"]]
            rows["mark"] = np.where(stalled, AT_CHANCE, rows["mark"])
            points(panel, s.label, rows, style, bars=len(shown) > MOST_BANDS)
        handles.append(Line2D([], [], label=s.label, **style))
    for panel, words in zip(
        panels, ("effective depth (layers)", "effective depth / N"), strict=True
    ):
        high = max(depths) if panel is panels[0] else 1.0
        ends = [min(depths), high] if panel is panels[0] else [1.0, 1.0]
        panel.axes.plot([min(depths), max(depths)], ends, color=GREY, ls=DASHES[1], lw=0.9)
        panel.add(pd.DataFrame({"x": [min(depths), max(depths)], "y": ends}), series=ALL_LAYERS,
                  kind="level")  # fmt: skip
        drawing.value_axis(words, [panel], log=panel is panels[0], include=high)
        depth_axis(panel.axes, depths)
        published(panel)
    handles.append(Line2D([], [], color=GREY, ls=DASHES[1], lw=0.9, label=ALL_LAYERS))
    notes = [*left, "least l with KL of the prediction after layer l below half of its maximum"]
    return drawing.finish("Effective depth against depth", notes, handles)
