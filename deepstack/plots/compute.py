"""Loss against training FLOPs, and against depth or width at equal FLOPs."""

from __future__ import annotations

from functools import partial

import pandas as pd

from deepstack.analysis.captions import means_note
from deepstack.analysis.compute import (
    WIDTH,
    Budgets,
    budgets_of,
    by_size,
    chosen_settings,
    least_loss,
    made_flops,
    size_of_axis,
)
from deepstack.analysis.quantities import FLOPS, find_quantity
from deepstack.analysis.settings import DEPTH, Series, depth_of, one_run_per_seed
from deepstack.analysis.statistics import final_value, has_diverged, loss_column, points_of
from deepstack.analysis.tidy import seed_statistics, tidy
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import MOST_PANELS, Arrangement
from deepstack.plots.drawing import Drawing
from deepstack.plots.loss import loss_label
from deepstack.plots.panel import MOST_BANDS
from deepstack.plots.style import extent, log_axis, shades
from deepstack.records import Run

COMPUTE = "training FLOPs"


@chart("loss_vs_compute")
def loss_vs_compute(runs: list[Run], *, options: Options) -> Chart:
    """Final validation loss against training FLOPs; with one budget a run, its loss on the way."""
    budgets = budgets_of(runs)
    final = list(budgets)
    drawing = Drawing(final, options, but=chosen_settings(budgets))
    arrangement = Arrangement(drawing)
    shown = arrangement.panels(MOST_PANELS)
    column = loss_column(final)
    rows = final_rows(drawing.series, budgets, column)
    if rows.groupby(["line", "depth"])["x"].nunique().max() < 2:
        rows = running_rows(drawing.series, column)
        drawing.notes.append("one budget: losses of the runs on their way to it")
    if rows.empty:
        raise NothingMatchedError("no run that did not diverge has a finite validation loss")
    around = [rows["x"].min() / 1.5, rows["x"].max() * 1.5]  # one budget needs an axis too
    for panel, (_, query, _) in drawing.fill([one.name for one in shown], shown):
        arrangement.draw(panel, rows.query(query), kind="point", ends=False, marker="o", ms=3)
        log_axis(panel.axes, "x", *extent(around))
        panel.axes.set_xlabel(COMPUTE)
    drawing.value_axis(loss_label(final), drawing.panels, log=drawing.is_wide(drawing.panels))
    arrangement.explain(rows)
    drawing.notes += means_note(final)
    return drawing.finish("Loss against training FLOPs")


def final_rows(series: list[Series], budgets: Budgets, column: str) -> pd.DataFrame:
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
    value = partial(final_value, column=loss_column(list(budgets)))
    colours = shades(levels[::-1])
    names = [s.label if len(drawing.series) > 1 else None for s in drawing.series]
    sizes: set[float] = set()
    compares = False
    for panel, s in drawing.fill(names, drawing.series):
        for budget in levels:
            members = by_size([run for run in s.runs if budgets[run] == budget], size)
            rows = points_of(members, value).drop(columns="by_seed")
            if rows.empty:
                continue
            sizes |= set(rows["x"])
            compares |= len(rows) > 1
            label, colour = words_of(budget), colours[budget]
            style = {"marker": "o", "color": colour, "linestyle": "-"}
            panel.points(label, rows, style, bars=len(levels) > MOST_BANDS)
            finished = rows[rows["mark"] != "diverged"]
            if (least := least_loss(finished["x"].tolist(), finished["y"].tolist())) is None:
                continue
            panel.ring(*least, color=colour, zorder=4)
            panel.add(pd.DataFrame([least], columns=["x", "y"]), series=label, kind="minimum")
    if not compares:
        raise NothingMatchedError("no two depths or widths have nearly equal training FLOPs")
    drawing.depth_axes(sorted(map(int, sizes)), "width d_model" if size == WIDTH else None)
    drawing.value_axis(loss_label(runs), drawing.panels, log=drawing.is_wide(drawing.panels))
    for budget in levels:
        drawing.entry(words_of(budget), marker="o", color=colours[budget])
    if len(drawing.rows("minimum")):
        drawing.ring_entry("least loss, by a parabola in log size")
    drawing.notes += means_note(list(budgets))
    return drawing.finish(f"Loss at equal FLOPs against {'depth' if size == DEPTH else 'width'}")


def words_of(budget: float) -> str:
    """Return a budget as the label of a line: `1e+12 FLOPs`."""
    return f"{budget:.2g} FLOPs"
