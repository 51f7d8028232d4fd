"""Values of every layer: gradient norm by layer, and any diagnostic over layers and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, Normalize
from matplotlib.lines import Line2D

from deepstack.analysis.series import choose_panels, evenly_spaced, split_series
from deepstack.analysis.settings import SEED
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import draw_curves
from deepstack.plots.draw import (
    Drawing,
    axis_label,
    heat_map,
    is_drawable,
    lines,
    markers,
    published,
)
from deepstack.plots.style import extent, layer_axis, log_axis, shade
from deepstack.records import Run
from deepstack.registry import nearest

MOST_RUNS = 6
MOST_STEPS = 7


@dataclass(frozen=True)
class Picked:
    """One run of a panel: its name there and its records. values is (records, depth)."""

    label: str
    steps: np.ndarray
    values: np.ndarray


def runs_with(runs: Sequence[Run], diagnostic: str) -> list[Run]:
    """Return the runs with a diagnostic.  Raises NothingMatchedError when there is none."""
    usable = [run for run in runs if diagnostic in run.layer_names()]
    known = sorted({name for run in runs for name in run.layer_names()})
    if not known:
        raise NothingMatchedError("no run has per-layer diagnostics (log.layers_every is 0?)")
    if not usable:
        near = nearest(diagnostic, known)
        hint = f"did you mean {near!r}? " if near else ""
        raise NothingMatchedError(
            f"no run has the per-layer diagnostic {diagnostic!r}; "
            f"{hint}there are: {', '.join(known)}"
        )
    return usable


def pick(usable: Sequence[Run], diagnostic: str) -> tuple[list[Picked], list[str]]:
    """Return one run a panel, and notes on the choice.

    Each series at its greatest depth; of one series each depth; always the lowest seed.
    """
    shown, notes = choose_panels(split_series(usable)[0], MOST_RUNS)
    seeds = {int(members[0].get(SEED, 0)) for _, members in shown}
    if len(usable) > len(shown) and len(seeds) == 1:
        notes.append(f"seed {min(seeds)}")
    picked = []
    for label, (run, *_) in shown:
        steps, values = run.layers(diagnostic)
        if run.state == "diverged":
            label += f" (diverged at step {run.status.get('step', '?')})"
        if len(steps):
            picked.append(Picked(label, steps, values.astype(float)))
    if not picked:
        raise NothingMatchedError(f"{diagnostic}: no snapshot was written yet")
    return picked, notes + sides_note(usable)


@chart("grad_norm_by_layer")
def grad_norm_by_layer(runs: list[Run], *, options: Options) -> Chart:
    """Gradient norm of each layer on the probe batch, several steps as shades."""
    usable = runs_with(runs, "grad_norm")
    picked, notes = pick(usable, "grad_norm")
    steps = evenly_spaced(sorted({int(s) for one in picked for s in one.steps}), MOST_STEPS)
    colours = {step: shade(len(steps) - 1 - i, len(steps)) for i, step in enumerate(steps)}
    drawing, zeros = Drawing(usable, options), False
    names = [one.label for one in picked]
    panels = drawing.add_panels(names, titles=names if len(names) > 1 else [""])
    for panel, one in zip(panels, picked, strict=True):
        depth = one.values.shape[1]
        for step, values in zip(one.steps, one.values, strict=True):
            if step in colours:
                rows = pd.DataFrame({"x": np.arange(1, depth + 1), "y": values})
                drawable = rows[np.isfinite(values) & (values > 0)]
                zeros |= len(drawable) < depth
                style: Any = {"marker": markers(depth), "ms": 2, "lw": 0.9}
                lines(panel, f"step {step}", drawable, color=colours[int(step)], **style)
        layer_axis(panel.axes, depth)
        published(panel)
    if drawing.rows("line").empty:
        raise NothingMatchedError("grad_norm: no value is finite and above 0")
    drawing.value_axis(axis_label(usable, "grad_norm", "gradient norm"), panels)
    handles = [Line2D([], [], color=c, label=f"step {step}") for step, c in colours.items()]
    notes += ["zeros and values that are not finite are not drawn"] if zeros else []
    return drawing.finish("Gradient norm by layer", notes, handles)


@chart("layer_step_heat_map")
def layer_step_heat_map(runs: list[Run], *, options: Options) -> Chart:
    """One diagnostic over layers and steps; a column is a snapshot, colours are logarithmic."""
    name = options.diagnostic
    usable = runs_with(runs, name)
    picked, notes = pick(usable, name)
    everything = np.concatenate([one.values.ravel() for one in picked])
    finite = everything[np.isfinite(everything)]
    if not len(finite):
        raise NothingMatchedError(f"{name}: no value is finite")
    log = bool((finite > 0).any() and (finite >= 0).all())
    ends = extent(finite.tolist(), 0.0) if log else (float(finite.min()), float(finite.max()))
    scale = LogNorm(*ends) if log else Normalize(*ends)
    drawing = Drawing(usable, options)
    names = [one.label for one in picked]
    panels = drawing.add_panels(names, titles=names if len(names) > 1 else [""])
    for panel, one in zip(panels, picked, strict=True):
        mesh = heat_map(panel, one.steps, one.values.T, scale)
    words = words_of(name)
    bar = drawing.page.colour_bar(mesh, axis_label(usable, name, words))
    if log:
        log_axis(bar, "y", *ends)
    bar.grid(False)
    notes += [] if is_drawable(everything, scale).all() else ["grey: zero or not finite"]
    return drawing.finish(f"{words[0].upper()}{words[1:]} by layer and step", notes)


@chart("last_layer_vs_step")
def last_layer_vs_step(runs: list[Run], *, options: Options) -> Chart:
    """One diagnostic of the last layer against the step, from the first step on."""
    name = options.diagnostic
    usable = runs_with(runs, name)
    words = f"{words_of(name)} of the last layer"

    def table_of(run: Run) -> pd.DataFrame:
        steps, values = run.layers(name)
        return pd.DataFrame({"step": steps, name: values[:, -1] if len(steps) else []})

    if not any(len(table_of(run)) for run in usable):
        raise NothingMatchedError(f"{name}: no snapshot was written yet")
    return draw_curves(
        usable,
        name,
        title=f"{words[0].upper()}{words[1:]}",
        y_label=axis_label(usable, name, words),
        options=options,
        source=table_of,
    )


def sides_note(runs: Sequence[Run]) -> list[str]:
    """Return a note on the layers of encoder and decoder, if there are two stacks."""
    sides = [run.columns.get("stacks", {}) for run in runs]
    if not all(len(stacks) == 2 for stacks in sides):
        return []
    depths = {stacks["encoder"] for stacks in sides}
    first = f"layers 1 to {min(depths)} are" if len(depths) == 1 else "the first layers are"
    return [f"{first} the encoder's, those after them the decoder's"]


def words_of(name: str) -> str:
    """A diagnostic's name as words: `gradient norm`, `LN input, feed-forward`."""
    full_words = {"grad": "gradient", "param": "parameter", "ln": "LN"}
    for part in ("cross_attention", "attention", "feed_forward"):
        if name.endswith(f"_{part}"):
            return f"{words_of(name.removesuffix(f'_{part}'))}, {part.replace('_', '-')}"
    return " ".join(full_words.get(word, word) for word in name.split("_"))
