"""Loss against training FLOPs, and against depth or width at equal FLOPs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from deepstack.analysis.compute import (
    WIDTH,
    budgets_of,
    by_size,
    chosen_settings,
    least_loss,
    made_flops,
    size_of_axis,
)
from deepstack.analysis.quantities import FLOPS, find_quantity
from deepstack.analysis.settings import DEPTH, Series, depth_of, one_run_per_seed
from deepstack.analysis.statistics import (
    final_value,
    has_diverged,
    loss_column,
    mask_note,
    points_of,
)
from deepstack.analysis.tidy import seed_statistics, tidy
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import MOST_PANELS, Arrangement
from deepstack.plots.drawing import MOST_BANDS, Drawing, draw_points, published
from deepstack.plots.loss import is_wide
from deepstack.plots.page import Handle
from deepstack.plots.style import GREY, depth_axis, extent, log_axis, shade
from deepstack.records import Run
from deepstack.records.cells import counted

COMPUTE = "training FLOPs"


@chart("loss_vs_compute")
def loss_vs_compute(runs: list[Run], *, options: Options) -> Chart:
    """Final validation loss against training FLOPs; with one budget a run, its loss on the way."""
    budgets = budgets_of(runs)
    final = list(budgets)
    drawing = Drawing(final, options, but=chosen_settings(budgets))
    arrangement = Arrangement(drawing)
    shown, notes = arrangement.panels(MOST_PANELS)
    column = loss_column(final)
    rows = final_rows(drawing.series, budgets, column)
    if rows.groupby(["line", "depth"])["x"].nunique().max() < 2:
        rows = running_rows(drawing.series, column)
        notes.append("one budget: losses of the runs on their way to it")
    if rows.empty:
        raise NothingMatchedError("no run that did not diverge has a finite validation loss")
    around = [rows["x"].min() / 1.5, rows["x"].max() * 1.5]  # one budget needs an axis too
    for panel, (_, query, _) in zip(
        drawing.add_panels([name for name, _, _ in shown]), shown, strict=True
    ):
        arrangement.draw(panel, rows.query(query), kind="point", ends=False, marker="o", ms=3)
        published(panel)
        log_axis(panel.axes, "x", *extent(around))
        panel.axes.set_xlabel(COMPUTE)
    log = is_wide(drawing, drawing.panels)
    drawing.value_axis(f"validation loss{mask_note(final)} (nats)", drawing.panels, log=log)
    entries, more = arrangement.handles(rows)
    notes += [*more, *diverged_note(final)]
    return drawing.finish("Loss against training FLOPs", notes, entries)


def final_rows(series: list[Series], budgets: Any, column: str) -> pd.DataFrame:
    """Return the rows of `Arrangement.draw`: at each budget the mean over the seeds that remain."""
    tables: list[pd.DataFrame] = []
    for i, s in enumerate(series):
        for depth in s.depths:
            here = [run for run in s.runs if depth_of(run) == depth and not has_diverged(run)]
            members: dict[float, list[Run]] = {}
            for run in here:
                members.setdefault(budgets[run], []).append(run)
            at = {
                made_flops(group): one_run_per_seed(group) for _, group in sorted(members.items())
            }
            rows = points_of(at, partial(final_value, column=column)).drop(columns="by_seed")
            tables.append(rows.assign(line=i, depth=depth, curve=len(tables)))
    return pd.concat(tables, ignore_index=True)


def running_rows(series: list[Series], column: str) -> pd.DataFrame:
    """Return the rows of `Arrangement.draw`: the seeds' mean at each evaluation after a step."""
    tables: list[pd.DataFrame] = []
    for i, s in enumerate(series):
        for depth in s.depths:
            members = [run for run in s.at(depth) if not has_diverged(run)]
            if not members:
                continue
            rows = seed_statistics(tidy(members, column, "evals", settings=()))
            flops = find_quantity(FLOPS, members).table(members[0]).set_index("step")["value"]
            rows["x"] = rows["x"].map(flops)
            rows = rows[rows["x"] > 0]
            tables.append(rows.assign(line=i, depth=depth, curve=len(tables), mark=""))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


@chart("iso_flop")
def iso_flop(runs: list[Run], *, options: Options) -> Chart:
    """Final validation loss at equal training FLOPs against depth, or width, a line a budget."""
    budgets = budgets_of(runs)
    size = size_of_axis(list(budgets))
    levels = sorted(set(budgets.values()))
    but = chosen_settings(budgets, [size] if size != DEPTH else [])
    drawing = Drawing(list(budgets), options, but=but)
    column = loss_column(list(budgets))
    colours = {budget: shade(len(levels) - 1 - i, len(levels)) for i, budget in enumerate(levels)}
    names = [s.label if len(drawing.series) > 1 else None for s in drawing.series]
    sizes: set[float] = set()
    compares = False
    for panel, s in zip(drawing.add_panels(names), drawing.series, strict=True):
        for budget, colour in colours.items():
            members = by_size([run for run in s.runs if budgets[run] == budget], size)
            rows = points_of(members, partial(final_value, column=column)).drop(columns="by_seed")
            if rows.empty:
                continue
            sizes |= set(rows["x"])
            compares |= len(rows) > 1
            label = words_of(budget)
            style: dict[str, Any] = {"marker": "o", "color": colour, "linestyle": "-"}
            draw_points(panel, rows, style, bars=len(levels) > MOST_BANDS)
            panel.add(rows, series=label, kind="point")
            finished = rows[rows["mark"] != "diverged"]
            if (least := least_loss(finished["x"].tolist(), finished["y"].tolist())) is None:
                continue
            ring: Any = {"ls": "none", "marker": "o", "ms": 9, "mfc": "none", "color": colour}
            panel.axes.plot(*least, **ring, zorder=4)
            panel.add(pd.DataFrame([least], columns=["x", "y"]), series=label, kind="minimum")
        published(panel)
    if not compares:
        raise NothingMatchedError("no two depths or widths have nearly equal training FLOPs")
    for panel in drawing.panels:
        depth_axis(panel.axes, sorted(map(int, sizes)))
        if size == WIDTH:
            panel.axes.set_xlabel("width d_model")
    log = is_wide(drawing, drawing.panels)
    drawing.value_axis(f"validation loss{mask_note(runs)} (nats)", drawing.panels, log=log)
    handles: list[Handle] = [
        Line2D([], [], marker="o", color=colour, label=words_of(budget))
        for budget, colour in colours.items()
    ]
    if len(drawing.rows("minimum")):
        look: Any = {"ls": "none", "marker": "o", "ms": 9, "mfc": "none", "mec": GREY}
        handles.append(Line2D([], [], label="least loss, by a parabola in log size", **look))
    title = f"Loss at equal FLOPs against {'depth' if size == DEPTH else 'width'}"
    return drawing.finish(title, diverged_note(list(budgets)), handles)


def words_of(budget: float) -> str:
    """Return a budget as the label of a line: `1e+12 FLOPs`."""
    return f"{budget:.2g} FLOPs"


def diverged_note(runs: list[Run]) -> list[str]:
    """Return a note on the runs that diverged, if any did."""
    count = sum(map(has_diverged, runs))
    return [f"left out of the means: {counted('{} diverged runs', count)}"] if count else []
