"""The right-hand side of DeepNet's theorem beside the model update that was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.lines import Line2D

from deepstack.analysis.captions import caption_of, title_of
from deepstack.analysis.fit import Fit, exponent_title, fit_points
from deepstack.analysis.series import split_series
from deepstack.analysis.settings import depth_of, scheme_label
from deepstack.analysis.statistics import (
    SATURATED,
    Point,
    has_diverged,
    has_diverged_by,
    points_of,
    unrelated_distance,
    with_steps,
)
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, Table, chart
from deepstack.plots.curves import Panel, draw_curves
from deepstack.plots.page import Handle, Page, typeset
from deepstack.plots.style import GREY, depth_axis, log_axis
from deepstack.plots.values import (
    ALL_DIVERGED,
    DASHED,
    add_points,
    deviation_handle,
    draw_level,
    draw_points,
    line_styles,
    log_extent,
    mark_handles,
)
from deepstack.records import Run

if TYPE_CHECKING:
    import pandas as pd

RIGHT = "right-hand side"
RATIO = "right-hand side / measured"


def right_hand_side(run: Run) -> pd.DataFrame | None:
    """Return step, bound, measured and ratio at every snapshot at which F has moved.

    bound: of an encoder or a decoder (Theorem 4.2) the sum of the terms of all sublayers; of both
    (Theorem 4.3) the encoder's sum times the sum over cross-attentions of v w/α, and the decoder's.
    None where the run has no such terms, or where the theorem does not speak of its scheme.
    """
    import pandas as pd

    names = run.layer_names()
    terms = {name: run.layers(name) for name in names if name.startswith("bound_")}
    depths = run.columns.get("stacks", {})
    if not terms or not depths:
        return None
    steps = next(iter(terms.values()))[0]

    def total(first: int, end: int, sublayers: Sequence[str]) -> np.ndarray:
        parts = [terms[f"bound_{name}"][1][:, first:end] for name in sublayers]
        return np.sum(np.concatenate(parts, axis=1, dtype=float), axis=1)

    sublayer_names = ("attention", "feed_forward")
    if len(depths) == 1:
        bound = total(0, next(iter(depths.values())), sublayer_names)
    else:
        first, end = depths["encoder"], sum(depths.values())
        factor = run.layers("effective_gain_cross_attention")[1][:, first:end].astype(float)
        encoder = factor.sum(axis=1) * total(0, first, sublayer_names)
        bound = encoder + total(first, end, (*sublayer_names, "cross_attention"))
    table = pd.DataFrame({"step": steps, "bound": bound})
    measured = run.steps[["step", "model_update"]].rename(columns={"model_update": "measured"})
    table = table.merge(measured, on="step")
    both = table[["bound", "measured"]].to_numpy(float)
    table = table[((both > 0) & np.isfinite(both)).all(axis=1)].copy()
    table["ratio"] = table["bound"] / table["measured"]
    return table if len(table) else None


def tables_of(runs: Sequence[Run]) -> dict[Run, pd.DataFrame]:
    """The runs of which the theorem speaks.  Raises NothingMatchedError when there is none."""
    runs = with_steps(runs)
    if not any(name.startswith("bound_") for run in runs for name in run.layer_names()):
        raise NothingMatchedError("no run has the terms of the bound (log.layers_every is 0?)")
    tables = {run: table for run in runs if (table := right_hand_side(run)) is not None}
    if not tables:
        raise NothingMatchedError(
            "Theorem 4.2 speaks of x <- LN(alpha x + G(x)) with LayerNorm or RMSNorm and ReLU, "
            "after a step: no run is of that form and has a snapshot after one"
        )
    return tables


def left_out(runs: Sequence[Run], used: Sequence[Run]) -> list[str]:
    """A note on the runs of which the theorem does not speak."""
    count = len(runs) - len(used)
    return [f"{count} of {len(runs)} runs are not of the theorem's form"] if count else []


@chart("bound_vs_measured")
def bound_vs_measured(runs: list[Run], *, options: Options) -> Chart:
    """The right-hand side of DeepNet's Theorem 4.2 over the measured ‖ΔF‖, against the step."""
    tables = {run: table for run, table in tables_of(runs).items() if len(table) > 1}
    if not tables:
        raise NothingMatchedError("no run has two snapshots after a step")

    def prepare(panel: Panel) -> None:
        draw_level(panel.axes, 1.0, "equal", panel.name, panel.table)

    return draw_curves(
        list(tables),
        "ratio",
        chart="bound_vs_measured",
        title="Theorem 4.2: right-hand side over measured model update",
        y_label="right-hand side / ‖ΔF‖",
        options=options,
        prepare=prepare,
        handles=[Line2D([], [], **DASHED, label="equal: below it is no bound")],
        source=lambda run: tables[run],
    )


def last_step(tables: dict[Run, pd.DataFrame]) -> tuple[int, list[str]]:
    """Return the last step at which all runs have a snapshot and most a value, and a note.

    A run without one there, because it left the theorem's form on the way, does not hold back the
    others.  Diverged runs have no say.  Raises NothingMatchedError when there is no such step.
    """
    finished = [run for run in tables if not has_diverged(run)] or list(tables)
    snapshots = [
        set(run.layers("bound_attention")[0].tolist()) & set(run.steps["step"].tolist())
        for run in finished
    ]
    count = Counter(step for run in finished for step in tables[run]["step"].tolist())
    good = [s for s in set.intersection(*snapshots) if 2 * count[s] > len(finished)]
    if not good:
        raise NothingMatchedError("the runs share no step with a snapshot")
    step = int(max(good))
    if step == max(map(max, snapshots)):
        return step, []
    return step, [f"step {step} is the last snapshot that all share and most have a value at"]


@chart("bound_vs_depth")
def bound_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """The right-hand side of Theorem 4.2 and the measured ‖ΔF‖ against depth, and their ratio."""
    tables = tables_of(runs)
    step, chosen = last_step(tables) if options.at_step is None else (options.at_step, [])
    used = [run for run in tables if step in tables[run]["step"].to_numpy()]
    if not used:
        raise NothingMatchedError(f"no run has a snapshot at step {step}")
    depths = sorted({depth_of(run) for run in used})
    if len(depths) < 2:
        raise NothingMatchedError(f"needs runs of two depths or more; all have N = {depths[0]}")

    def value(run: Run, column: str) -> float | None:
        values = tables[run][tables[run]["step"] == step][column]
        return float(values.iloc[0]) if len(values) else None

    diverged_by = partial(has_diverged_by, step=step)
    # Of all runs: one that diverged before this step marks its point.
    series, depth_settings = split_series(list(tables))
    table = Table()
    page = Page(1, 2, height=1.9)
    both, quotient = page.axes
    both.set_title(f"both, step {step}")
    quotient.set_title(f"ratio, step {step}")
    entries: list[Handle] = []
    fitted: list[Fit | None] = []
    drawn: dict[str, list[Point]] = {RIGHT: [], "measured": [], RATIO: []}
    for s, line in zip(series, line_styles(series, options.runs), strict=True):
        style = line | {"linestyle": "-"}  # dotted is the other side
        measured = points_of(
            s.depths,
            s.at,
            partial(value, column="measured"),
            lambda run: SATURATED * unrelated_distance(run, "model_update"),
            diverged_by,
        )
        if not measured:
            continue
        marks = {point.depth: point.mark for point in measured}
        by_quantity = {"measured": measured}
        for name, column in ((RIGHT, "bound"), (RATIO, "ratio")):
            points = points_of(s.depths, s.at, partial(value, column=column), gone=diverged_by)
            by_quantity[name] = [replace(p, mark=marks[p.depth]) for p in points]
        draw_points(both, measured, style)
        x, y = zip(*((p.depth, p.value.mean) for p in by_quantity[RIGHT]), strict=True)
        both.plot(x, y, color=style["color"], ls=":", lw=1.0, marker=style["marker"], ms=1.8)
        draw_points(quotient, by_quantity[RATIO], style)
        fits = {name: fit_points(points) for name, points in by_quantity.items()}
        fitted += fits.values()
        for name, points in by_quantity.items():
            drawn[name] += points
            add_points(table, name, s.label, points, fits[name])
        label = f"{s.label}: {fits['measured'] or 'no fit'}, dotted {fits[RIGHT] or 'no fit'}"
        entries.append(Line2D([], [], **style, label=label))
    both.set_ylabel(typeset("‖ΔF‖ and the right-hand side"))
    quotient.set_ylabel("right-hand side / ‖ΔF‖")
    quotient.axhline(1.0, zorder=1.5, **DASHED)
    ratios = [row for row in table.rows if row["panel"] == RATIO]
    log_axis(both, "y", *log_extent([row for row in table.rows if row["panel"] != RATIO]))
    log_axis(quotient, "y", *log_extent([{"y": 1.0}, *ratios]))
    for axes in page.axes:
        depth_axis(axes, depths)
    page.legend_below(0, entries, exponent_title(fitted).replace("exponent", "exponents", 1))
    handles: list[Handle] = [
        Line2D([], [], color=GREY, ls=":", lw=1.0, label="right-hand side of the theorem"),
        Line2D([], [], **DASHED, label="equal: below it is no bound"),
    ]
    handles += mark_handles({p.mark for p in drawn["measured"]}, gone=ALL_DIVERGED)
    handles += deviation_handle(p.value.n for p in drawn["measured"])
    title = "Theorem 4.2 and the measured model update against depth"
    notes = left_out(runs, list(tables)) + chosen + caption_of(used, depth_settings)
    if without := [run for run in tables if run not in used]:
        named = (f"{scheme_label(run)}, N = {depth_of(run)}" for run in without)
        notes.append(f"no value at step {step}: {'; '.join(dict.fromkeys(named))}")
    if any(p.mark for p in drawn["measured"]):
        notes.append("hollow points are left out of the fits")
    figure = page.finish(title, title_of(used, series), notes, handles)
    return Chart(figure, table.frame(), title)
