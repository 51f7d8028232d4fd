"""Loss against the learning rate; the best rate against depth, its exponent and published laws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from deepstack.analysis.compute import by_value
from deepstack.analysis.settings import LR, depth_of, setting_value
from deepstack.analysis.statistics import (
    evaluated_runs,
    final_value,
    has_diverged,
    loss_column,
    points_of,
    validation_levels,
)
from deepstack.analysis.transfer import (
    PUBLISHED_LAWS,
    Losses,
    final_losses,
    mean_curve,
    shared_seeds,
    transfer,
)
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.drawing import Drawing
from deepstack.plots.loss import draw_levels, loss_label
from deepstack.plots.panel import EDGE_RATE
from deepstack.plots.style import DASHES, GREY, number_axis, shades
from deepstack.records import Run
from deepstack.records.cells import counted


def runs_of_rates(runs: list[Run]) -> list[Run]:
    """Return the finished runs.  Raises NothingMatchedError for fewer than two learning rates."""
    final = evaluated_runs(runs)
    if len({run.get(LR) for run in final}) < 2:
        raise NothingMatchedError("needs finished runs of two learning rates or more")
    return final


@chart("loss_vs_lr")
def loss_vs_lr(runs: list[Run], *, options: Options) -> Chart:
    """Final validation loss against the learning rate, a curve a depth, the best rate of each."""
    final = runs_of_rates(runs)
    drawing = Drawing(final, options, but=[LR])
    rate = partial(setting_value, key=LR)
    members = {
        (s, n): by_value([run for run in s.runs if depth_of(run) == n], rate)
        for s in drawing.series
        for n in s.depths
    }
    if max(map(len, members.values())) < 2:
        raise NothingMatchedError("needs finished runs of two learning rates at one depth")
    value = partial(final_value, column=loss_column(final))
    curves = {cell: points_of(at, value).drop(columns="by_seed") for cell, at in members.items()}
    curves = {cell: rows[rows["mark"] != "diverged"] for cell, rows in curves.items()}
    shown = [s for s in drawing.series if any(len(curves[s, n]) for n in s.depths)]
    if not shown:
        raise NothingMatchedError("every run diverged, or has no finite validation loss")
    groups = drawing.setting_groups(series=shown)
    colours = shades(sorted({n for s in shown for n in s.depths}, reverse=True))
    for depth, colour in sorted(colours.items()):
        drawing.entry(f"N = {depth}", marker="o", color=colour)
    for panel, group in drawing.fill([group.name for group in groups], groups):
        (s,) = group.series
        for depth in s.depths:
            rows = curves[s, depth]
            style = {"marker": "o", "color": colours[depth], "linestyle": "-"}
            panel.mark_points(rows, style)
            best = rows[rows["mark"] == ""].nsmallest(1, "y")
            if len(best):
                panel.ring(best["x"], best["y"], "best", color=colours[depth])
            kinds = np.where(rows.index.isin(best.index), "best", "point")
            panel.add(rows.assign(kind=kinds), style, series=f"N = {depth}")
        draw_levels(panel, validation_levels(s.runs))
    rows = drawing.rows("point", "best")
    drawing.value_axis(loss_label(final), drawing.panels)
    for panel in drawing.panels:
        number_axis(panel.axes, "x", rows["x"].tolist(), log=True)
        panel.axes.set_xlabel("learning rate")
    diverged = sum(map(has_diverged, final))
    left = f"left out: {counted('{} diverged runs', diverged)}; best is among rates without one"
    drawing.note(left, when=diverged)
    unfinished = ", ".join(s.label for s in drawing.series if s not in shown)
    drawing.note(f"nothing finished of {unfinished}", when=unfinished)
    return drawing.finish("Final validation loss against learning rate")


@chart("best_lr_vs_depth")
def best_lr_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """The best learning rate against depth with its 95 % interval, exponent and published laws."""
    drawing = Drawing(runs_of_rates(runs), options, but=(LR,))
    drawing.spread = "95 % interval over samples of the seeds"
    losses = {s: losses_of_depths(s.runs) for s in drawing.series}
    if not any(len(by_depth) > 1 for by_depth in losses.values()):
        raise NothingMatchedError(
            "needs two depths, each with two learning rates and a seed that all of them share"
        )
    (panel,) = drawing.add_panels([None], height=2.2)
    for s, style in drawing.styles.items():
        if len(losses[s]) < 2:
            drawing.note(f"{s.label}: no seed has a loss at every rate of two depths")
            continue
        result = transfer(losses[s])
        rows = pd.DataFrame(
            [(best.depth, *best.rate, best.seeds, "" if best.inside else EDGE_RATE)
             for best in result.best],
            columns=["x", "y", "low", "high", "n", "mark"],
        )  # fmt: skip
        panel.points(s.label, rows, style)
        drawing.entry(f"{s.label}: {result.exponent.text(2) if result.exponent else '–'}", **style)
        if result.exponent is not None:
            fit = result.exponent.columns("exponent")
            size = {"n": len(result.best), "seeds": result.best[0].seeds}
            drawing.table.add(panel=panel.name, series=s.label, kind="fit", **fit, **size)
    points = drawing.rows("point")
    depths = sorted({int(depth) for depth in points["x"]})
    first = points[points["x"] == depths[0]]["y"]
    anchor = math.exp(sum(map(math.log, first)) / len(first))
    for (name, (power, source)), dash in zip(PUBLISHED_LAWS.items(), DASHES[1:], strict=True):
        law = [anchor * (depth / depths[0]) ** power for depth in depths]
        look: Any = {"color": GREY, "ls": dash, "lw": 0.8}
        panel.lines(name, pd.DataFrame({"x": depths, "y": law}), kind="law", zorder=1.5, **look)
        drawing.entry(f"{typeset_power(name)} ({source})", **look)
    panel.published()
    drawing.depth_axes(depths)
    drawing.value_axis("best learning rate", [panel], log=True)
    drawing.note("laws pass through the mean rate at the smallest depth")
    title = "exponent of N, with its 95 % interval"
    return drawing.finish("Best learning rate against depth", legend_title=title)


def losses_of_depths(runs: Sequence[Run]) -> Losses:
    """Return the final losses at depths with two rates or more and a finite mean loss at one."""
    losses = final_losses(runs, loss_column(runs))
    losses = {depth: by_rate for depth, by_rate in losses.items() if len(by_rate) > 1}
    if not (seeds := shared_seeds(losses)):
        return {}
    return {n: at for n, at in losses.items() if math.isfinite(mean_curve(at, seeds)[1].min())}


def typeset_power(name: str) -> str:
    """Return `N^(−1/2)` with its exponent raised."""
    base, _, power = name.partition("^")
    return f"${base}^{{{power.strip('()')}}}$"
