"""Values of every layer: gradient norm by layer, and any diagnostic over layers and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator

from deepstack.analysis.captions import caption_of, title_of
from deepstack.analysis.series import choose_panels, evenly_spaced, split_series
from deepstack.analysis.settings import SEED
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, Table, chart
from deepstack.plots.curves import draw_curves, grid
from deepstack.plots.page import Handle, Page
from deepstack.plots.style import extent, layer_axis, log_axis, shade
from deepstack.plots.values import axis_label, draw_reference, write_no_value
from deepstack.records import Run
from deepstack.registry import nearest

if TYPE_CHECKING:
    import pandas as pd

MOST_RUNS = 6
MOST_STEPS = 7


@dataclass(frozen=True)
class Picked:
    """One run of a panel: its name there and its records. values is (records, depth)."""

    run: Run
    label: str
    steps: np.ndarray
    values: np.ndarray


def pick(runs: Sequence[Run], diagnostic: str) -> tuple[list[Picked], list[Run], list[str]]:
    """Choose runs to show; return them, all usable runs, and notes on the choice.

    Each series at its greatest depth; of one series each depth; always the lowest seed.
    Raises NothingMatchedError when no run has this diagnostic.
    """
    known = sorted({name for run in runs for name in run.layer_names()})
    usable = [run for run in runs if diagnostic in run.layer_names()]
    if not usable:
        if not known:
            raise NothingMatchedError("no run has per-layer diagnostics (log.layers_every is 0?)")
        near = nearest(diagnostic, known)
        hint = f"did you mean {near!r}? " if near else ""
        raise NothingMatchedError(
            f"no run has the per-layer diagnostic {diagnostic!r}; "
            f"{hint}there are: {', '.join(known)}"
        )
    series, _ = split_series(usable)
    shown, notes = choose_panels(series, MOST_RUNS)
    picks = [(label, members[0]) for label, members in shown]
    seeds = {int(run.get(SEED, 0)) for _, run in picks}
    if len(usable) > len(picks) and len(seeds) == 1:
        notes.append(f"seed {min(seeds)}")
    picked = []
    for label, run in picks:
        steps, values = run.layers(diagnostic)
        if run.state == "diverged":
            label += f" (diverged at step {run.status.get('step', '?')})"
        if len(steps):
            picked.append(Picked(run, label, steps, values))
    if not picked:
        raise NothingMatchedError(f"{diagnostic}: no snapshot was written yet")
    return picked, usable, notes


@chart("grad_norm_by_layer")
def grad_norm_by_layer(runs: list[Run], *, options: Options) -> Chart:
    """Gradient norm of each layer on the probe batch, several steps as shades."""
    picked, usable, notes = pick(runs, "grad_norm")
    all_steps = sorted({int(step) for one in picked for step in one.steps})
    steps = evenly_spaced(all_steps, MOST_STEPS)
    table = Table()
    rows, columns = grid(len(picked))
    page = Page(rows, columns, panels=len(picked), height=1.9 if len(picked) == 1 else 1.5)
    published: list[Handle] = []
    zeros = False
    for axes, one in zip(page.axes, picked, strict=True):
        axes.set_title(one.label if len(picked) > 1 else "")
        layers = np.arange(1, one.values.shape[1] + 1)
        for i, step in enumerate(steps):
            where = np.flatnonzero(one.steps == step)
            if not len(where):
                continue
            values = one.values[where[0]].astype(float)
            drawable = np.isfinite(values) & (values > 0)
            zeros |= bool((~drawable).any())
            axes.plot(
                layers[drawable],
                values[drawable],
                color=shade(len(steps) - 1 - i, len(steps)),
                marker="o" if len(layers) <= 24 else None,
                ms=2,
                lw=0.9,
            )
            for layer, value in zip(layers[drawable], values[drawable], strict=True):
                table.add(
                    panel=one.label, series=f"step {step}", kind="line", x=int(layer), y=value
                )
        if not any(row["panel"] == one.label for row in table.rows):
            write_no_value(axes)
        layer_axis(axes, len(layers))
        published = (
            draw_reference(axes, options, "grad_norm_by_layer", table, one.label) or published
        )
    if not any(row["kind"] == "line" for row in table.rows):
        raise NothingMatchedError("grad_norm: no value is finite and above 0")
    low, high = extent([row["y"] for row in table.rows])
    for axes in page.axes:
        log_axis(axes, "y", low, high)
        axes.set_ylabel(axis_label(usable, "grad_norm", "gradient norm"))
    page.outer_labels_only()
    handles: list[Handle] = [
        Line2D([], [], color=shade(len(steps) - 1 - i, len(steps)), label=f"step {step}")
        for i, step in enumerate(steps)
    ]
    if zeros:
        notes.append("zeros and values that are not finite are not drawn")
    title = "Gradient norm by layer"
    series, depth_settings = split_series(usable)
    caption = notes + sides_note(usable) + caption_of(usable, depth_settings)
    figure = page.finish(title, title_of(usable, series), caption, handles + published)
    return Chart(figure, table.frame(), title)


@chart("layer_step_heat_map")
def layer_step_heat_map(runs: list[Run], *, options: Options) -> Chart:
    """One diagnostic over layers and steps; a column is a snapshot, colours are logarithmic."""
    name = options.diagnostic
    picked, usable, notes = pick(runs, name)
    everything = np.concatenate([one.values.ravel() for one in picked]).astype(float)
    finite = everything[np.isfinite(everything)]
    if not len(finite):
        raise NothingMatchedError(f"{name}: no value is finite")
    positive = finite[finite > 0]
    logarithmic = len(positive) > 0 and bool((finite >= 0).all())
    scale: Normalize
    if logarithmic:
        scale = LogNorm(*extent([float(positive.min()), float(positive.max())], 0.0))
    else:
        scale = Normalize(float(finite.min()), float(finite.max()))
    table = Table()
    rows, columns = grid(len(picked))
    page = Page(rows, columns, panels=len(picked), height=1.9 if len(picked) == 1 else 1.5)
    mesh = None
    empty = False
    for axes, one in zip(page.axes, picked, strict=True):
        axes.set_title(one.label if len(picked) > 1 else "")
        records, depth = one.values.shape
        values = one.values.T.astype(float)
        drawable = np.isfinite(values) & ((values > 0) | (not logarithmic))
        empty |= bool((~drawable).any())
        # An image rather than thousands of paths in the SVG.
        mesh = axes.pcolormesh(
            np.arange(records + 1) - 0.5,
            np.arange(depth + 1) + 0.5,
            np.ma.masked_array(values, ~drawable),
            norm=scale,
            cmap="viridis",
            rasterized=True,
        )
        axes.set_facecolor("#DDDDDD")
        axes.grid(False)
        places = evenly_spaced(range(records), 6)
        axes.xaxis.set_major_locator(FixedLocator(places))
        axes.xaxis.set_ticklabels([str(int(one.steps[i])) for i in places])
        axes.set_xlabel("step t of the snapshot")
        layer_axis(axes, depth, "y")
        for i, step in enumerate(one.steps):
            for layer in range(depth):
                value = values[layer, i]
                table.add(
                    panel=one.label, kind="cell", x=int(step), y=layer + 1, value=float(value)
                )
    assert mesh is not None
    label = axis_label(usable, name, words_of(name))
    bar = page.colour_bar(mesh, label)
    if logarithmic:
        log_axis(bar, "y", scale.vmin or 0.1, scale.vmax or 1.0)
    bar.grid(False)
    page.outer_labels_only(same_y=False)
    if empty:
        notes.append("grey: zero or not finite")
    words = words_of(name)
    title = f"{words[0].upper()}{words[1:]} by layer and step"
    series, depth_settings = split_series(usable)
    caption = notes + sides_note(usable) + caption_of(usable, depth_settings)
    figure = page.finish(title, title_of(usable, series), caption)
    return Chart(figure, table.frame(), title)


@chart("last_layer_vs_step")
def last_layer_vs_step(runs: list[Run], *, options: Options) -> Chart:
    """One diagnostic of the last layer against the step, from the first step on."""
    import pandas as pd

    name = options.diagnostic
    _, usable, _ = pick(runs, name)
    words = f"{words_of(name)} of the last layer"

    def table_of(run: Run) -> pd.DataFrame:
        steps, values = run.layers(name)
        return pd.DataFrame({"step": steps, name: values[:, -1] if len(steps) else []})

    return draw_curves(
        usable,
        name,
        chart="last_layer_vs_step",
        title=f"{words[0].upper()}{words[1:]}",
        y_label=axis_label(usable, name, words),
        options=options,
        prepare=lambda panel: None,
        handles=[],
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
    sublayers = ("_cross_attention", "_attention", "_feed_forward")
    for part in sublayers:
        suffix = f", {part[1:].replace('_', '-')}"
        if name.endswith(part):
            return words_of(name.removesuffix(part)) + suffix
    return " ".join(full_words.get(word, word) for word in name.split("_"))
