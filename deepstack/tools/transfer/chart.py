"""Chart of the best learning rate against depth, beside published laws."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from deepstack.plots import (
    DASHES,
    EDGE_RATE,
    GREY,
    Chart,
    Drawing,
    Options,
    Panel,
    chart,
    runs_of_rates,
    typeset_power,
)
from deepstack.records import Run
from deepstack.runs import LEAST_SEEDS, LR, NO_INTERVAL, Runs, Series, require
from deepstack.tools.transfer.table import (
    PUBLISHED_LAWS,
    Losses,
    blind_note,
    can_refine,
    final_losses,
    mean_curve,
    shared_seeds,
    transfer,
)


@chart("best_lr_vs_depth", main=3)
def best_lr_vs_depth(runs: Runs, *, options: Options) -> Chart:
    """The best learning rate against depth with its 95 % interval, exponent and published laws."""
    drawing = Drawing(runs_of_rates(runs), options, but=(LR,))
    drawing.legend.spread = "95 % interval over seeds"
    losses = {s: losses_of_depths(s.runs) for s in drawing.series}
    require(
        any(len(by_depth) > 1 for by_depth in losses.values()),
        "needs two depths, each with two learning rates and a seed that all of them share",
    )
    for s in drawing.series:
        note = blind_note(s.label, s.runs)
        drawing.note(note, when=note)
    for panel, _ in drawing.arrange([None], height=2.2):
        draw_best_rates(drawing, panel, losses)
    points = drawing.rows("point")
    drawing.depth_axes(sorted({int(depth) for depth in points["x"]}))
    drawing.value_axis("best learning rate", drawing.panels, log=True)
    drawing.note("laws pass through the mean rate at the smallest depth")
    has_interval = any(n >= LEAST_SEEDS for n in points["n"])
    drawing.note(NO_INTERVAL, when=not has_interval)
    title = "exponent of N, with its 95 % interval" if has_interval else "exponent of N"
    return drawing.finish("Best learning rate against depth", legend_title=title)


def draw_best_rates(drawing: Drawing, panel: Panel, losses: Mapping[Series, Losses]) -> None:
    """Draw the best rates of each series, and the published laws through their mean."""
    for s, style in drawing.styles.items():
        if len(losses[s]) < 2:
            drawing.note(f"{s.label}: no seed has a loss at every rate of two depths")
            continue
        result = transfer(losses[s], refines=can_refine(s.runs))
        rows = pd.DataFrame(
            [(best.depth, *best.rate, best.seeds, "" if best.inside else EDGE_RATE)
             for best in result.best],
            columns=["x", "y", "low", "high", "n", "mark"],
        )  # fmt: skip
        panel.points(s.label, rows, style)
        drawing.entry(f"{s.label}: {result.exponent.text(2) if result.exponent else '–'}", **style)
        for advice in result.advice:
            drawing.note(f"{s.label}, no exponent: {advice}")
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
        drawing.entry(f"{typeset_law(name)} ({source})", **look)


def losses_of_depths(runs: Sequence[Run]) -> Losses:
    """Return the final losses at depths with two rates or more and a finite mean loss at one."""
    losses = final_losses(runs)
    losses = {depth: by_rate for depth, by_rate in losses.items() if len(by_rate) > 1}
    if not (seeds := shared_seeds(losses)):
        return {}
    return {n: at for n, at in losses.items() if math.isfinite(mean_curve(at, seeds)[1].min())}


def typeset_law(name: str) -> str:
    """Return `N^(−1/2)` with its exponent raised."""
    base, _, exponent = name.partition("^")
    return typeset_power(base, exponent.strip("()"))
