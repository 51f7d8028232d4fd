"""Values of every layer: gradients, their ratios, any diagnostic over layers or steps."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from deepstack.base.text import counted
from deepstack.config.key import Key
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import draw_curves
from deepstack.plots.drawing import Drawing
from deepstack.plots.page import axis_label
from deepstack.plots.panel import Panel, is_drawable, markers, scale_of
from deepstack.plots.style import COLOURS, DASHES, GREY, layer_axis, shades
from deepstack.plots.texts import typeset
from deepstack.records import Run
from deepstack.runs.captions import diverged_note, sides_note
from deepstack.runs.runs import Runs
from deepstack.runs.settings import evenly_spaced, require
from deepstack.runs.tidy import array_statistics

MOST_STEPS = 7
MOST_SETTINGS = 4  # of the ratios of gradients
KINDS = {"attention": COLOURS[0], "cross_attention": COLOURS[1], "feed_forward": COLOURS[2]}
RATIOS = {
    "β_LN": ("β_{LN}", "through the norm"),
    "β_RC": ("β_{RC}", "over the sum"),
    "β_LN·β_RC": ("β_{LN}·β_{RC}", "both"),
}
# Reported for Post-LN by Zhang et al. 2019, arXiv:1908.11365, section 3.
PUBLISHED = {"β_LN": (0.82, 0.86), "β_RC": (1.10, 1.22)}

# Steps of the records that all seeds share, and values (seeds, records, layers), NaN if not finite.
Records = tuple[np.ndarray, np.ndarray]


def runs_with(runs: Runs, diagnostic: str) -> Runs:
    """Return the runs with a diagnostic.  Raises NothingMatchedError when there is none."""
    any_recorded = any(run.layer_names() for run in runs)
    require(any_recorded, "no run has per-layer diagnostics (log.layers_every is 0?)")
    return runs.keep(
        lambda run: diagnostic in run.layer_names(),
        f"no run has the per-layer diagnostic {diagnostic!r}; deepstack list diagnostics has all",
    )


def pick(drawing: Drawing, diagnostic: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return steps and values (records, depth) of one run a panel by name.

    Each series at its greatest depth; of one series each depth; always the lowest seed.
    """
    picked = {}
    for cell, run in drawing.first_seeds():
        steps, values = run.layers(diagnostic)
        if len(steps):
            picked[cell.label] = (steps, values.astype(float))
    drawing.notes += sides_note(drawing.runs)
    return require(picked, f"{diagnostic}: no snapshot was written yet")


@chart("grad_norm_by_layer", main=8)
def grad_norm_by_layer(runs: Runs, *, options: Options) -> Chart:
    """Gradient norm of each layer on the probe batch, several steps as shades."""
    drawing = Drawing(runs_with(runs, "grad_norm"), options)
    lost = 0
    picked = pick(drawing, "grad_norm")
    is_known: dict[int, bool] = {}  # step -> whether a layer has a gradient
    for taken_at, records in picked.values():
        for step, values in zip(map(int, taken_at), records, strict=True):
            is_known[step] = is_known.get(step, False) or bool(np.isfinite(values).any())
    steps = evenly_spaced(sorted(step for step in is_known if is_known[step]), MOST_STEPS)
    colours = shades(steps[::-1])
    for panel, (taken_at, records) in drawing.arrange(picked.values(), list(picked)):
        depth = records.shape[1]
        for step, values in zip(taken_at, records, strict=True):
            if step in colours:
                rows = pd.DataFrame({"x": np.arange(1, depth + 1), "y": values})
                lost += int((~np.isfinite(values)).sum())
                drawable = drawing.above_zero(rows[np.isfinite(values)])
                style: Any = {"marker": markers(depth), "ms": 2, "lw": 0.9}
                panel.lines(f"step {step}", drawable, color=colours[int(step)], **style)
        layer_axis(panel.axes, depth)
    require(not drawing.rows("line").empty, "grad_norm: no value is finite and above 0")
    drawing.value_axis(
        axis_label(drawing.runs, "grad_norm", "gradient norm"), drawing.panels, log=True
    )
    for step in steps:
        drawing.entry(f"step {step}", color=colours[step])
    drawing.note(f"left out: {counted('{} values', lost)} not finite", when=lost)
    without = ", ".join(str(step) for step in sorted(is_known) if not is_known[step])
    drawing.note(f"no gradient is known at step {without}", when=without)
    return drawing.finish("Gradient norm by layer")


@chart("layer_step_heat_map", main=9)
def layer_step_heat_map(runs: Runs, *, options: Options) -> Chart:
    """One diagnostic over layers and steps; a column is a snapshot, colours are logarithmic."""
    name = options.diagnostic
    drawing = Drawing(runs_with(runs, name), options)
    picked = pick(drawing, name)
    everything = np.concatenate([values.ravel() for _, values in picked.values()])
    require(np.isfinite(everything).any(), f"{name}: no value is finite")
    scale = scale_of(everything)
    for panel, records in drawing.arrange(picked.values(), list(picked), published=False):
        mesh = panel.heat_map(*records, scale)
    words = Key(name).words
    drawing.page.colour_bar(mesh, axis_label(drawing.runs, name, words))
    drawing.note("grey: zero or not finite", when=not is_drawable(everything, scale).all())
    return drawing.finish(f"{words[0].upper()}{words[1:]} by layer and step")


@chart("last_layer_vs_step")
def last_layer_vs_step(runs: Runs, *, options: Options) -> Chart:
    """One diagnostic of the last layer against the step, from the first step on."""
    name = options.diagnostic
    usable = runs_with(runs, name)
    words = f"{Key(name).words} of the last layer"

    def table_of(run: Run) -> pd.DataFrame:
        steps, values = run.layers(name)
        return pd.DataFrame({"step": steps, name: values[:, -1] if len(steps) else []})

    require(any(len(table_of(run)) for run in usable), f"{name}: no snapshot was written yet")
    return draw_curves(
        usable,
        name,
        title=f"{words[0].upper()}{words[1:]}",
        y_label=axis_label(usable, name, words),
        options=options,
        source=table_of,
    )


def records_of(members: Sequence[Run], name: str) -> Records | None:
    """Return a diagnostic of all seeds; None where one lacks it or no value is above 0."""
    if not all(name in run.layer_names() for run in members):
        return None
    diagnostics = [run.layers(name) for run in members]
    shared = sorted(set.intersection(*(set(steps.tolist()) for steps, _ in diagnostics)))
    values = np.array([v[np.isin(steps, shared)] for steps, v in diagnostics], dtype=float)
    values[~np.isfinite(values)] = np.nan
    return (np.array(shared), values) if (values > 0).any() else None


def read_ratios(members: Sequence[Run]) -> dict[tuple[str, str], Records]:
    """Return what these seeds have, by symbol of RATIOS and kind of sublayer."""
    ratios: dict[tuple[str, str], Records] = {}
    for kind in KINDS:
        ln, rc = (records_of(members, f"{name}_{kind}") for name in ("beta_ln", "beta_rc"))
        both = (ln[0], ln[1] * rc[1]) if ln and rc else None
        every = zip(RATIOS, (ln, rc, both), strict=True)
        ratios |= {(symbol, kind): each for symbol, each in every if each is not None}
    return ratios


@chart("gradient_ratios")
def gradient_ratios(runs: Runs, *, options: Options) -> Chart:
    """Ratios β_LN, β_RC and their product by layer and sublayer, at the first and last record."""
    usable = runs.keep(
        lambda run: "beta_ln_feed_forward" in run.layer_names(),
        "no run has the per-layer diagnostics beta_ln and beta_rc",
    )
    drawing = Drawing(usable, options)
    cells = drawing.groups("stacks", MOST_SETTINGS)
    ratios = [read_ratios(cell.runs) for cell in cells]
    require(any(ratios), "β_LN and β_RC: no value is finite")
    rows = list(product(range(len(cells)), RATIOS))
    names = [": ".join(filter(None, [cells[i].name, symbol])) for i, symbol in rows]
    titles = [cells[i].name or typeset(RATIOS[symbol][0]) for i, symbol in rows]
    layout: Any = {"titles": titles, "columns": len(RATIOS), "height": 1.25}
    for panel, (i, symbol) in drawing.arrange(rows, names, **layout):
        draw_published(panel, symbol)
        draw_ratios(drawing, panel, symbol, ratios[i], cells[i].runs)
    for column, (symbol, words) in enumerate(RATIOS.values()):
        label = f"{typeset(symbol)}, {words}"
        drawing.value_axis(label, drawing.panels[column :: len(RATIOS)], log=True)
    drawing.notes += sides_note(usable)
    drawing.note("layers whose gradient is 0 have no ratio")
    drawing.notes += diverged_note((cell.label, cell.runs) for cell in cells)
    for kind, colour in KINDS.items():
        if any(kind == known for each in ratios for _, known in each):
            drawing.entry(kind.replace("_", "-"), color=colour)
    drawing.entry("first snapshot", color=GREY, ls="-")
    drawing.entry("last snapshot", color=GREY, ls=DASHES[1])
    if len(drawing.rows("predicted")):
        drawing.entry("first snapshot: 1/sqrt(α² + Var G)", color=GREY, ls=DASHES[2], lw=0.7)
    drawing.entry("published for Post-LN", patch=True, color=GREY, alpha=0.18, lw=0)
    return drawing.finish("Gradient ratios by layer")


def draw_ratios(
    drawing: Drawing,
    panel: Panel,
    symbol: str,
    ratios: dict[tuple[str, str], Records],
    members: Sequence[Run],
) -> None:
    """Draw one ratio of each kind of sublayer, and the prediction; broken where a stack ends."""
    if not ratios:
        return
    first = members[0].columns.get("stacks", {}).get("encoder", 0)
    depth = next(iter(ratios.values()))[1].shape[2]
    layer_axis(panel.axes, depth, ticks=4)
    for kind, colour in KINDS.items():
        if (symbol, kind) not in ratios:
            continue
        steps, values = ratios[symbol, kind]
        lines: list[tuple[str, np.ndarray, dict[str, Any]]] = [
            (f"step {int(steps[record])}", values[:, record], {"ls": dash, "lw": 1.1})
            for record, dash in zip(sorted({0, len(steps) - 1}), DASHES, strict=False)
        ]
        expected = records_of(members, f"beta_ln_predicted_{kind}") if symbol == "β_LN" else None
        if expected is not None:
            look = {"ls": DASHES[2], "lw": 0.7, "kind": "predicted", "band": False}
            lines.append(("predicted", expected[1][:, 0], look))
        for name, of_seeds, look in lines:
            rows = array_statistics(np.arange(1, depth + 1), of_seeds)
            rows = drawing.above_zero(rows)
            style: Any = look | {"color": colour, "ms": 1.8, "marker": markers(len(rows))}
            for part in (rows[rows["x"] <= first], rows[rows["x"] > first]):
                panel.lines(f"{kind.replace('_', '-')}, {name}", part, **style)


def draw_published(panel: Panel, symbol: str) -> None:
    """The published range as a band, and the line at 1 that says growing or vanishing."""
    panel.axes.axhline(1.0, color=GREY, lw=0.6, zorder=1)
    panel.add(pd.DataFrame({"y": [1.0]}), series="neither grows nor vanishes", kind="level")
    if symbol in PUBLISHED:
        low, high = PUBLISHED[symbol]
        panel.axes.axhspan(low, high, color=GREY, alpha=0.18, lw=0)
        panel.add(pd.DataFrame({"y": [low, high]}), series="published", kind="reference")
