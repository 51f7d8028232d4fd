"""Values of every layer: gradient norms and their ratios, and any diagnostic over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepstack.analysis.captions import diverged_note
from deepstack.analysis.settings import (
    SEED,
    choose_panels,
    choose_series,
    evenly_spaced,
    left_out_note,
)
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import draw_curves
from deepstack.plots.drawing import (
    Drawing,
    Panel,
    axis_label,
    heat_map,
    is_drawable,
    lines,
    markers,
    published,
)
from deepstack.plots.page import Handle, typeset
from deepstack.plots.style import COLOURS, DASHES, GREY, extent, layer_axis, log_axis, shade
from deepstack.records import Run
from deepstack.registry import nearest

MOST_RUNS = 6
MOST_STEPS = 7
MOST_SETTINGS = 4
KINDS = {
    "attention": "attention",
    "cross_attention": "cross-attention",
    "feed_forward": "feed-forward",
}
KIND_COLOURS = dict(zip(KINDS, COLOURS, strict=False))
# Reported for Post-LN by Zhang et al. 2019, arXiv:1908.11365, section 3.
PUBLISHED = {"β_LN": (0.82, 0.86), "β_RC": (1.10, 1.22)}
WORDS = {"β_LN": "through the norm", "β_RC": "over the sum", "β_LN·β_RC": "both"}


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


def pick(
    drawing: Drawing, diagnostic: str
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], list[str]]:
    """Return steps and values (records, depth) of one run a panel by name, and notes on the choice.

    Each series at its greatest depth; of one series each depth; always the lowest seed.
    """
    usable = drawing.runs
    shown, notes = choose_panels(drawing.series, drawing.limit(MOST_RUNS))
    seeds = {int(members[0].get(SEED, 0)) for _, members in shown}
    if len(usable) > len(shown) and len(seeds) == 1:
        notes.append(f"seed {min(seeds)}")
    picked = {}
    for label, (run, *_) in shown:
        steps, values = run.layers(diagnostic)
        if run.state == "diverged":
            label += f" (diverged at step {run.status.get('step', '?')})"
        if len(steps):
            picked[label] = (steps, values.astype(float))
    if not picked:
        raise NothingMatchedError(f"{diagnostic}: no snapshot was written yet")
    return picked, notes + sides_note(usable)


@chart("grad_norm_by_layer")
def grad_norm_by_layer(runs: list[Run], *, options: Options) -> Chart:
    """Gradient norm of each layer on the probe batch, several steps as shades."""
    drawing, zeros = Drawing(runs_with(runs, "grad_norm"), options), False
    picked, notes = pick(drawing, "grad_norm")
    steps = evenly_spaced(
        sorted({int(s) for taken_at, _ in picked.values() for s in taken_at}), MOST_STEPS
    )
    colours = {step: shade(len(steps) - 1 - i, len(steps)) for i, step in enumerate(steps)}
    panels = drawing.add_panels(list(picked))
    for panel, (taken_at, records) in zip(panels, picked.values(), strict=True):
        depth = records.shape[1]
        for step, values in zip(taken_at, records, strict=True):
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
    drawing.value_axis(axis_label(drawing.runs, "grad_norm", "gradient norm"), panels)
    handles = [Line2D([], [], color=c, label=f"step {step}") for step, c in colours.items()]
    notes += ["zeros and values that are not finite are not drawn"] if zeros else []
    return drawing.finish("Gradient norm by layer", notes, handles)


@chart("layer_step_heat_map")
def layer_step_heat_map(runs: list[Run], *, options: Options) -> Chart:
    """One diagnostic over layers and steps; a column is a snapshot, colours are logarithmic."""
    name = options.diagnostic
    usable = runs_with(runs, name)
    drawing = Drawing(usable, options)
    picked, notes = pick(drawing, name)
    everything = np.concatenate([values.ravel() for _, values in picked.values()])
    finite = everything[np.isfinite(everything)]
    if not len(finite):
        raise NothingMatchedError(f"{name}: no value is finite")
    log = bool((finite > 0).any() and (finite >= 0).all())
    ends = extent(finite.tolist(), 0.0) if log else (float(finite.min()), float(finite.max()))
    scale = LogNorm(*ends) if log else Normalize(*ends)
    for panel, records in zip(drawing.add_panels(list(picked)), picked.values(), strict=True):
        mesh = heat_map(panel, *records, scale)
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


@dataclass(frozen=True)
class Ratios:
    """One quantity of one kind of sublayer: (seeds, records, layers), NaN where not finite."""

    steps: np.ndarray
    values: np.ndarray

    def rows(self, record: int) -> pd.DataFrame:
        """Mean and deviation over the seeds (x, y, low, high, n) of the layers that all have."""
        at = self.values[:, record]
        mean, n = at.mean(axis=0), len(at)
        deviation = at.std(axis=0, ddof=1) if n > 1 else np.full_like(mean, np.nan)
        layers = np.arange(1, len(mean) + 1)
        columns = {"x": layers, "y": mean, "low": mean - deviation, "high": mean + deviation}
        return pd.DataFrame(columns | {"n": n})[mean > 0]


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
    deepest = {s: s.at(s.depths[-1]) for s in drawing.series}
    ratios = {s: read_kinds(members) for s, members in deepest.items()}
    if not any(ratios.values()):
        raise NothingMatchedError("β_LN and β_RC: no value is finite")
    # A setting with something to show in every panel comes first, one without any has none.
    complete = [s for s in ratios if len({symbol for symbol, _ in ratios[s]}) == len(WORDS)]
    partly = [s for s in ratios if ratios[s] and s not in complete]
    most = drawing.limit(MOST_SETTINGS)
    choice, _ = choose_series(complete, most)
    choice += choose_series(partly, most - len(choice))[0]
    shown = [s for s in drawing.series if s in choice]
    labels = {s: f"{s.label}, N\u00a0=\u00a0{s.depths[-1]}" for s in shown}
    several = len(shown) > 1 or len({depth for s in drawing.series for depth in s.depths}) > 1
    cells = [(s, symbol) for s in shown for symbol in WORDS]
    panels = drawing.add_panels(
        [f"{labels[s]}: {symbol}" for s, symbol in cells],
        titles=[labels[s] if several else in_braces(symbol) for s, symbol in cells],
        columns=len(WORDS),
        height=1.25,
    )
    for panel, (s, symbol) in zip(panels, cells, strict=True):
        draw_published(panel, symbol)
        draw_ratios(panel, symbol, ratios[s], deepest[s])
        published(panel)
    for column, symbol in enumerate(WORDS):
        label = f"{in_braces(symbol)}, {WORDS[symbol]}"
        drawing.value_axis(label, panels[column :: len(WORDS)])
    notes = ["each at its greatest depth"] if any(len(s.depths) > 1 for s in shown) else []
    notes += left_out_note([s.label for s in drawing.series if s not in shown])
    notes += sides_note(usable)
    if gaps := [note for s in shown for note in gaps_of(labels[s], ratios[s])]:
        notes.append(f"no ratio where the gradient is 0: {'; '.join(gaps)}")
    notes += diverged_note((labels[s], deepest[s]) for s in shown)
    drawn = [each for s in shown for each in ratios[s].values()]
    first, last = (sorted({int(each.steps[end]) for each in drawn}) for end in (0, -1))
    handles: list[Handle] = [
        Line2D([], [], color=KIND_COLOURS[kind], label=KINDS[kind])
        for kind in KINDS
        if any(kind == known for s in shown for _, known in ratios[s])
    ]
    handles.append(Line2D([], [], color=GREY, ls="-", label=step_words(first, "first")))
    if first != last:
        handles.append(Line2D([], [], color=GREY, ls=DASHES[1], label=step_words(last, "last")))
    if len(drawing.rows("predicted")):
        words = f"1/sqrt(α² + Var G), {step_words(first, 'first')}"
        handles.append(Line2D([], [], color=GREY, ls=DASHES[2], lw=0.7, label=words))
    handles.append(Patch(color=GREY, alpha=0.18, lw=0, label="published for Post-LN"))
    return drawing.finish("Gradient ratios by layer", notes, handles)


def in_braces(symbol: str) -> str:
    """The symbol with both of its letters as subscripts."""
    return typeset(symbol.replace("_LN", "_{LN}").replace("_RC", "_{RC}"))


def gaps_of(label: str, ratios: dict[tuple[str, str], Ratios]) -> list[str]:
    """Where the last record has no ratio of layers that the first one has: in one of the seeds."""
    layers: set[int] = set()
    for each in ratios.values():
        layers |= set(each.rows(0)["x"]) - set(each.rows(-1)["x"])
    if not layers:
        return []
    step = int(next(iter(ratios.values())).steps[-1])
    low, high = min(layers), max(layers)
    several = "" if len(layers) == high - low + 1 else f"{len(layers)} of "
    return [f"{label}, step {step}, {several}layers {low} to {high}"]


def draw_ratios(
    panel: Panel, symbol: str, ratios: dict[tuple[str, str], Ratios], members: Sequence[Run]
) -> None:
    """Draw one ratio of each kind of sublayer, and the prediction; broken where a stack ends."""
    stacks = members[0].columns.get("stacks", {})
    layer_axis(panel.axes, sum(stacks.values()) or 1, ticks=4)
    for kind, colour in KIND_COLOURS.items():
        each = ratios.get((symbol, kind))
        if each is None:
            continue
        layer_axis(panel.axes, each.values.shape[2], ticks=4)
        styles: list[tuple[Ratios, int, str, str, Any]] = [
            (each, record, f"step {int(each.steps[record])}", "line", dash)
            for record, dash in zip(sorted({0, len(each.steps) - 1}), DASHES, strict=False)
        ]
        expected = read(members, f"beta_ln_predicted_{kind}") if symbol == "β_LN" else None
        if expected is not None:
            styles.append((expected, 0, "predicted", "predicted", DASHES[2]))
        for source, record, name, row_kind, dash in styles:
            rows, first = source.rows(record), stacks.get("encoder", 0)
            width = 0.7 if row_kind == "predicted" else 1.1
            style: Any = {"color": colour, "ls": dash, "lw": width, "ms": 1.8}
            for part in (rows[rows["x"] <= first], rows[rows["x"] > first]):
                lines(
                    panel, f"{KINDS[kind]}, {name}", part, kind=row_kind, band=row_kind == "line",
                    marker=markers(len(rows)), **style,
                )  # fmt: skip


def draw_published(panel: Panel, symbol: str) -> None:
    """The published range as a band, and the line at 1 that says growing or vanishing."""
    panel.axes.axhline(1.0, color=GREY, lw=0.6, zorder=1)
    panel.add(pd.DataFrame({"y": [1.0]}), series="neither grows nor vanishes", kind="level")
    if symbol in PUBLISHED:
        low, high = PUBLISHED[symbol]
        panel.axes.axhspan(low, high, color=GREY, alpha=0.18, lw=0)
        panel.add(pd.DataFrame({"y": [low, high]}), series="published", kind="reference")


def step_words(steps: Sequence[int], which: str) -> str:
    """`step 20`, or where settings differ in it `each one's last snapshot, step 2 to 20`."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"each one's {which} snapshot, step {steps[0]} to {steps[-1]}"
