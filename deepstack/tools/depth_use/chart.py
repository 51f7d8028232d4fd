"""The contribution of each layer of a trained stack: results of `deepstack analyze`."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.collections import QuadMesh
from matplotlib.colors import Normalize

from deepstack.plots import AT_CHANCE, DASHES, GREY, Chart, Drawing, Options, Panel, chart, typeset
from deepstack.records import Analysis, Run, analysis_names
from deepstack.runs import (
    Runs,
    array_statistics,
    depths_of,
    evenly_spaced,
    outcome,
    points_of,
    require,
)

MOST_LINES = 10
MOST_CELLS = 32
ALL_LAYERS = "all layers"
ALL_STYLE: Any = {"color": GREY, "ls": DASHES[1], "lw": 0.9}


def analyses_of(runs: Sequence[Run], name: str) -> dict[Run, Analysis]:
    """Return the runs that have an analysis.  Raises NothingMatchedError when there is none."""
    analyses = {}
    for run in runs:
        with contextlib.suppress(KeyError):
            analyses[run] = run.analysis(name)
    return require(analyses, f"no run has it: deepstack analyze RUN --what {name} measures it")


@chart("lens_by_layer")
def lens_by_layer(runs: Runs, *, options: Options) -> Chart:
    """KL to the final output and loss, read by the head after each layer, over the seeds."""
    analyses = analyses_of(runs, "lens")
    drawing = Drawing(Runs(analyses), options)
    cells = drawing.groups("stacks", MOST_LINES)
    keys = {"KL to the final output": "kl", "loss": "loss"}
    for panel, key in drawing.arrange(keys.values(), list(keys), height=1.9):
        for i, cell in enumerate(cells):
            values = np.array([analyses[run].arrays[key] for run in cell.runs], float)
            x = np.arange(values.shape[1]) / (values.shape[1] - 1)
            look = drawing.curve_style(cell.series[0], cell.depths[0], len(cells)) | {"lw": 0.9}
            rows = array_statistics(x, values)
            if key == "kl":  # 0 at the last layer
                rows = drawing.above_zero(rows)
            panel.lines(cell.label, rows, place=(i, len(cells)), **look)
        label = typeset("KL(p_l ‖ p_N) (nats)") if key == "kl" else "loss (nats)"
        drawing.value_axis(label, [panel], log=key == "kl")
        panel.axes.set(xlim=(-0.02, 1.02), xlabel="layer l / N")
    drawing.explain(cells, len(cells))
    drawing.note("l = 0: the embedding; KL is 0 at l = N")
    return drawing.finish("Prediction read after each layer")


@chart("effects")
def effects(runs: Runs, *, options: Options) -> Chart:
    """Relative change of the contribution of each later layer when a layer is removed."""
    drawing = Drawing(Runs(analyses_of(runs, "effects")), options)
    for panel, arrays in analysed_panels(drawing, "effects"):
        layers = np.arange(1, arrays["effect_mean"].shape[1] + 1)
        mesh = pair_map(drawing, panel, arrays["removed"], layers, arrays["effect_mean"])
        panel.axes.set(xlabel="removed layer s", ylabel="later layer l")
    drawing.page.colour_bar(mesh, "relative change of its contribution")
    drawing.note("grey: not a later layer; above 1 drawn as 1")
    return drawing.finish("Effect of removing a layer on later layers")


@chart("layer_similarity")
def layer_similarity(runs: Runs, *, options: Options) -> Chart:
    """Linear CKA of the streams after any two layers, 0 being the embedding."""
    drawing = Drawing(Runs(analyses_of(runs, "similarity")), options)
    for panel, arrays in analysed_panels(drawing, "similarity"):
        mesh = pair_map(drawing, panel, arrays["layers"], arrays["layers"], arrays["cka"])
        panel.axes.set(xlabel="layer l", ylabel="layer m")
    drawing.page.colour_bar(mesh, "linear CKA")
    return drawing.finish("Similarity of the stream after two layers")


def analysed_panels(drawing: Drawing, name: str) -> Iterator[tuple[Panel, dict[str, np.ndarray]]]:
    """Return a panel and the arrays of one seed's analysis for each setting or depth."""
    cells = drawing.first_seeds()
    arrays = [run.analysis(name).arrays for _, run in cells]
    return drawing.arrange(arrays, [cell.name for cell, _ in cells], published=False)


def pair_map(
    drawing: Drawing, panel: Panel, columns: np.ndarray, rows: np.ndarray, values: np.ndarray
) -> QuadMesh:
    """Draw values (columns, rows) from 0 to 1, at most MOST_CELLS each way."""
    x, y = (evenly_spaced(range(len(each)), MOST_CELLS) for each in (columns, rows))
    thinned = f"at most {MOST_CELLS} layers are drawn, evenly spaced"
    is_new = thinned not in drawing.notes
    drawing.note(thinned, when=is_new and max(len(columns), len(rows)) > MOST_CELLS)
    return panel.heat_map(columns[x], values[np.ix_(x, y)], Normalize(0, 1), rows=rows[y])


@chart("effective_depth_vs_depth")
def effective_depth_vs_depth(runs: Runs, *, options: Options) -> Chart:
    """Effective depth and its share of the depth against depth, mean over seeds."""
    analyses = analyses_of(runs, "lens")
    used = Runs(analyses)
    depths = depths_of(used)
    drawing = Drawing(used, options)
    shown = [group.series[0] for group in drawing.groups("series", MOST_LINES)]
    keys = {"layers": "effective_depth", "share of the depth": "effective_depth_ratio"}
    for panel, key in drawing.arrange(keys.values(), list(keys), height=1.9):
        for s in shown:
            rows = points_of(s.by_depth, lambda run, key=key: analyses[run].scalars[key])  # type: ignore[misc]
            learnt = {n: {outcome(run) for run in s.at(int(n))} for n in rows["x"]}
            stalled = [not learnt[n] & {"trained", None} for n in rows["x"]]
            is_at_chance = np.array(stalled, dtype=bool) & (rows["mark"] != "diverged")
            rows["mark"] = rows["mark"].mask(is_at_chance, AT_CHANCE)
            panel.points(s.label, rows, drawing.styles[s], entry=True)
        low, high = (min(depths), max(depths)) if key == "effective_depth" else (1.0, 1.0)
        every = pd.DataFrame({"x": [min(depths), max(depths)], "y": [low, high]})
        panel.lines(ALL_LAYERS, every, kind="level", **ALL_STYLE)
        words = "effective depth (layers)" if key == "effective_depth" else "effective depth / N"
        drawing.value_axis(words, [panel], log=key == "effective_depth", include=high)
    drawing.depth_axes(depths)
    drawing.entry(ALL_LAYERS, **ALL_STYLE)
    least = "least l with KL of the prediction after layer l below half of its maximum"
    drawing.note(least)
    return drawing.finish("Effective depth against depth")


def lenses_by_step(run: Run) -> dict[int, Analysis]:
    """Return the lens of a run at each step at which it was analyzed, by step."""
    names = (name for name in analysis_names(run.folder) if re.fullmatch(r"lens(_at_\d+)?", name))
    found = {int(one.about["step"]): one for one in map(run.analysis, names) if "step" in one.about}
    return dict(sorted(found.items()))


@chart("effective_depth_vs_step")
def effective_depth_vs_step(runs: Runs, *, options: Options) -> Chart:
    """Share of the depth that is used against the step of the weights, mean over seeds."""
    every = {run: lenses_by_step(run) for run in runs}
    several = {run: lenses for run, lenses in every.items() if len(lenses) > 1}
    how = "no run has it at two steps: deepstack analyze RUN --what lens --step N measures it"
    drawing = Drawing(Runs(require(several, how)), options)
    cells = drawing.groups("stacks", MOST_LINES)
    for panel, key in drawing.arrange(["effective_depth_ratio"], ["share of the depth"]):
        for i, cell in enumerate(cells):
            steps = sorted(set.intersection(*(set(several[run]) for run in cell.runs)))
            values = [[several[run][step].scalars[key] for step in steps] for run in cell.runs]
            look = drawing.curve_style(cell.series[0], cell.depths[0], len(cells)) | {"lw": 0.9}
            rows = array_statistics(np.array(steps, float), np.array(values, float))
            panel.lines(cell.label, rows, place=(i, len(cells)), **look)
        drawing.value_axis("effective depth / N", [panel], include=1.0)
        panel.axes.set(xlabel="step")
    drawing.explain(cells, len(cells))
    return drawing.finish("Effective depth during training")
