"""The right-hand side of DeepNet's Theorem 4.2 beside the measured model update."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from deepstack.plots import GREY, Chart, Drawing, Options, chart, draw_curves, typeset
from deepstack.records import Run
from deepstack.runs import (
    Runs,
    ceiling_of,
    depth_of,
    depths_of,
    fit_points,
    has_diverged_by,
    last_row,
    points_of,
    require,
    scheme_label,
    shared_step,
)

RIGHT, RATIO = "right-hand side", "right-hand side / measured"
EQUAL = ("equal", "ratio 1: below it the right-hand side is not a bound")
CROSS, GAIN = "bound_cross_attention", "effective_gain_cross_attention"


def right_hand_side(run: Run) -> pd.DataFrame | None:
    """Return step, bound, measured and ratio at every snapshot at which F has moved.

    bound: of an encoder or a decoder (Theorem 4.2) the sum of the terms of all sublayers; of both
    (Theorem 4.3) the encoder's sum times the sum over cross-attentions of v w/α, and the decoder's.
    None where the run has no such terms, or where the theorem does not speak of its scheme.
    """
    names = [name for name in run.layer_names() if name.startswith(("bound_", GAIN))]
    values = {name: run.layers(name)[1].astype(float) for name in names}
    if not names:
        return None
    terms = values["bound_attention"] + values["bound_feed_forward"]
    bound = terms.sum(axis=1)
    if GAIN in values:
        first = run.columns["stacks"]["encoder"]  # layer of the decoder
        encoder, decoder = terms[:, :first].sum(axis=1), terms[:, first:].sum(axis=1)
        cross, gain = (values[name][:, first:].sum(axis=1) for name in (CROSS, GAIN))
        bound = gain * encoder + decoder + cross
    table = pd.DataFrame({"step": run.layers("bound_attention")[0], "bound": bound})
    measured = run.steps[["step", "model_update"]].rename(columns={"model_update": "measured"})
    table = table.merge(measured, on="step")
    both = table[["bound", "measured"]].to_numpy(float)
    table = table[((both > 0) & np.isfinite(both)).all(axis=1)].copy()
    table["ratio"] = table["bound"] / table["measured"]
    return table if len(table) else None


def tables_of(runs: Runs) -> dict[Run, pd.DataFrame]:
    """The runs of which the theorem speaks.  Raises NothingMatchedError when there is none."""
    runs = runs.with_steps()
    require(
        any(name.startswith("bound_") for run in runs for name in run.layer_names()),
        "no run has the terms of the bound (log.layers_every is 0?)",
    )
    tables = {run: table for run in runs if (table := right_hand_side(run)) is not None}
    return require(
        tables,
        "Theorem 4.2 speaks of x <- LN(alpha x + G(x)) with LayerNorm or RMSNorm and ReLU, "
        "after a step: no run is of that form and has a snapshot after one",
    )


@chart("bound_vs_measured")
def bound_vs_measured(runs: Runs, *, options: Options) -> Chart:
    """The right-hand side of DeepNet's Theorem 4.2 over the measured ‖ΔF‖, against the step."""
    tables = {run: table for run, table in tables_of(runs).items() if len(table) > 1}
    require(tables, "no run has two snapshots after a step")
    return draw_curves(
        Runs(tables),
        "ratio",
        title="Theorem 4.2: right-hand side over measured model update",
        y_label="right-hand side / ‖ΔF‖",
        options=options,
        prepare=lambda panel, _: panel.level(1.0, *EQUAL),
        source=lambda run: tables[run],
    )


def last_snapshot(runs: Sequence[Run]) -> tuple[int, list[str]]:
    """Return the last step at which all runs that did not diverge have a snapshot, and a note."""
    steps = {run: {*run.layers("bound_attention")[0]} & {*run.steps["step"]} for run in runs}
    step, used = shared_step(steps)
    is_early = step < max(max(steps[run]) for run in used)
    return step, [f"step {step} is the last snapshot that all share"] if is_early else []


@chart("bound_vs_depth")
def bound_vs_depth(runs: Runs, *, options: Options) -> Chart:
    """The right-hand side of Theorem 4.2 and the measured ‖ΔF‖ against depth, and their ratio."""
    tables = tables_of(runs)
    step, note = last_snapshot(list(tables)) if options.at_step is None else (options.at_step, [])
    used = [run for run in tables if step in tables[run]["step"].to_numpy()]
    require(used, f"no run has a snapshot at step {step}")
    depths = depths_of(used)
    diverged_by = partial(has_diverged_by, step=step)
    ceiling = partial(ceiling_of, column="model_update")

    def value(run: Run, column: str) -> float | None:
        return last_row(tables[run][tables[run]["step"] == step], column)

    # Of all runs: one that diverged before this step marks its point.
    drawing = Drawing(Runs(tables), options)
    titles = [f"both, step {step}", f"ratio, step {step}"]
    names = [RIGHT, RATIO]
    layout: Any = {"titles": titles, "height": 1.9, "published": False}
    right, ratio = (panel for panel, _ in drawing.arrange(names, names, **layout))
    measured = replace(right, name="measured")
    for s, line in drawing.styles.items():
        style = line | {"linestyle": "-"}  # dotted is the other side
        rows = points_of(s.by_depth, partial(value, column="measured"), ceiling, diverged_by)
        if rows.empty:
            continue
        drawing.entry(s.label, **style)
        for panel, column, label in (
            (measured, "measured", "‖ΔF‖"),
            (right, "bound", "right-hand side"),
            (ratio, "ratio", "ratio"),
        ):
            part = points_of(s.by_depth, partial(value, column=column), gone=diverged_by)
            part["mark"] = rows["mark"]
            if panel is right:
                dots = {"ls": ":", "lw": 1.0, "marker": style["marker"], "ms": 1.8}
                dots |= {"color": style["color"]}
                panel.axes.plot(part["x"], part["y"], **dots)
                panel.add(part, dots, series=s.label, kind="point")
            else:
                panel.points(s.label, part, style)
            panel.add_fit(s.label, fit_points(part), label)
    ratio.level(1.0, *EQUAL)
    drawing.value_axis(typeset("‖ΔF‖ and the right-hand side"), [right, measured], log=True)
    drawing.value_axis("right-hand side / ‖ΔF‖", [ratio], log=True, include=1.0)
    drawing.depth_axes(depths)
    drawing.entry("right-hand side of the theorem", color=GREY, ls=":", lw=1.0)
    drawing.notes += note
    left = len(runs) - len(tables)
    drawing.note(f"{left} of {len(runs)} runs have no right-hand side of the theorem", when=left)
    if without := [run for run in tables if run not in used]:
        named = (f"{scheme_label(run)}, N = {depth_of(run)}" for run in without)
        drawing.note(f"no value at step {step}: {'; '.join(dict.fromkeys(named))}")
    drawing.note("hollow points are left out of the fits", when=drawing.legend.marks)
    drawing.runs = Runs(used)
    return drawing.finish("Theorem 4.2 and the measured model update against depth")
