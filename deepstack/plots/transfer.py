"""The best learning rate against depth, with its exponent and published laws."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from deepstack.analysis.fit import signed
from deepstack.analysis.settings import LR, SEED, Series, depth_of
from deepstack.analysis.statistics import final_value, has_diverged, loss_column
from deepstack.analysis.transfer import (
    PUBLISHED_LAWS,
    Interval,
    Losses,
    Transfer,
    mean_curve,
    shared_seeds,
    transfer,
)
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.drawing import EDGE_RATE, Drawing, draw_points, published
from deepstack.plots.page import Handle
from deepstack.plots.style import DASHES, GREY, depth_axis
from deepstack.records import Run


@chart("best_lr_vs_depth")
def best_lr_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """The best learning rate against depth with its 95 % interval, exponent and published laws."""
    final = [run for run in runs if run.state in ("done", "diverged") and len(run.evals)]
    if len({run.get(LR) for run in final}) < 2:
        raise NothingMatchedError("needs finished runs of two learning rates or more")
    drawing = Drawing(final, options, but=(LR,))
    drawing.spread = "95 % interval over samples of the seeds"
    transfers: list[tuple[int, Transfer]] = []
    notes: list[str] = []
    for i, s in enumerate(drawing.series):
        losses = losses_of(s)
        if len(losses) > 1:
            transfers.append((i, transfer(losses)))
        else:
            notes.append(f"{s.label}: no seed has a loss at every rate of two depths")
    if not transfers:
        raise NothingMatchedError(
            "needs two depths, each with two learning rates and a seed that all of them share"
        )
    (panel,) = drawing.add_panels([None], height=2.2)
    handles: list[Handle] = []
    for i, result in transfers:
        style, label = drawing.styles[i], drawing.series[i].label
        rows = rows_of(result)
        draw_points(panel, rows, style, bars=True)
        panel.add(rows, series=label, kind="point")
        handles.append(Line2D([], [], **style, label=f"{label}: {exponent_text(result.exponent)}"))
        if result.exponent is not None:
            value, low, high = result.exponent
            fit = {"exponent": value, "exponent_low": low, "exponent_high": high}
            fit |= {"n": len(result.best), "seeds": result.best[0].seeds}
            drawing.table.add(panel=panel.name, series=label, kind="fit", **fit)
    points = drawing.rows("point")
    depths = sorted({int(depth) for depth in points["x"]})
    first = points[points["x"] == depths[0]]["y"]
    anchor = math.exp(sum(map(math.log, first)) / len(first))
    for (name, (power, source)), dash in zip(PUBLISHED_LAWS.items(), DASHES[1:], strict=True):
        law = [anchor * (depth / depths[0]) ** power for depth in depths]
        look: Any = {"color": GREY, "ls": dash, "lw": 0.8, "zorder": 1.5}
        panel.axes.plot(depths, law, **look)
        panel.add(pd.DataFrame({"x": depths, "y": law}), series=name, kind="law")
        handles.append(Line2D([], [], **look, label=f"{typeset_power(name)} ({source})"))
    published(panel)
    depth_axis(panel.axes, depths)
    drawing.value_axis("best learning rate", [panel])
    notes.append("laws pass through the mean rate at the smallest depth")
    title = "exponent of N, with its 95 % interval"
    return drawing.finish("Best learning rate against depth", notes, handles, title)


def losses_of(series: Series) -> Losses:
    """Return the final validation losses of the seeds that all rates of all depths share.

    Depths with one rate, and those at which no rate has a finite mean loss, are left out.
    """
    losses: dict[int, dict[float, dict[int, float]]] = {}
    column = loss_column(series.runs)
    for run in series.runs:
        loss = math.inf if has_diverged(run) else final_value(run, column)
        loss = loss if math.isfinite(loss) else math.inf
        by_rate = losses.setdefault(depth_of(run), {})
        by_rate.setdefault(float(run.get(LR)), {})[int(run.get(SEED, 0))] = loss
    losses = {depth: by_rate for depth, by_rate in losses.items() if len(by_rate) > 1}
    if not (seeds := shared_seeds(losses)):
        return {}
    return {n: at for n, at in losses.items() if math.isfinite(mean_curve(at, seeds)[1].min())}


def rows_of(result: Transfer) -> pd.DataFrame:
    """Return one row (x, y, low, high, n, mark) for the best rate at each depth."""
    rows = [
        (best.depth, *best.rate, best.seeds, "" if best.inside else EDGE_RATE)
        for best in result.best
    ]
    return pd.DataFrame(rows, columns=["x", "y", "low", "high", "n", "mark"])


def exponent_text(exponent: Interval | None) -> str:
    """Return an exponent with its interval: `−0.52 (−0.61 to −0.44)`."""
    if exponent is None:
        return "–"
    value, low, high = exponent
    interval = "" if math.isnan(low) else f" ({signed(low, 2)} to {signed(high, 2)})"
    return signed(value, 2) + interval


def typeset_power(name: str) -> str:
    """Return `N^(−1/2)` with its exponent raised."""
    base, _, power = name.partition("^")
    return f"${base}^{{{power.strip('()')}}}$"
