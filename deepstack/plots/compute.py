"""Loss against training FLOPs, and against depth or width at equal FLOPs."""

from __future__ import annotations

from functools import partial

import pandas as pd

from deepstack.analysis.captions import means_note
from deepstack.analysis.compute import (
    WIDTH,
    Budgets,
    budgets_of,
    by_value,
    chosen_settings,
    least_loss,
    made_flops,
    size_of_axis,
)
from deepstack.analysis.settings import DEPTH, depth_of, setting_value
from deepstack.analysis.statistics import final_value, has_diverged, loss_column, points_of
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import curve_rows, draw_group
from deepstack.plots.drawing import Drawing, Group
from deepstack.plots.loss import loss_label
from deepstack.plots.style import number_axis, shades
from deepstack.records import Run

COMPUTE = "training FLOPs"


@chart("loss_vs_compute")
def loss_vs_compute(runs: list[Run], *, options: Options) -> Chart:
    """Final validation loss against training FLOPs; with one budget a run, its loss on the way."""
    budgets = budgets_of(runs)
    final = list(budgets)
    drawing = Drawing(final, options, but=chosen_settings(budgets))
    groups = drawing.curve_groups()
    column = loss_column(final)
    tables = [final_rows(group, budgets, column) for group in groups]
    if max(rows.groupby(["line", "depth"])["x"].nunique().max() for rows in tables) < 2:
        tables = [curve_rows(group, column, losses_by_flops) for group in groups]
        tables = [rows.query("x > 0 and mark != 'diverged'").assign(mark="") for rows in tables]
        drawing.note("one budget: losses of the runs on their way to it")
    flops = pd.concat(tables)["x"]
    if flops.empty:
        raise NothingMatchedError("no run that did not diverge has a finite validation loss")
    around = [flops.min() / 1.5, flops.max() * 1.5]  # one budget needs an axis too
    contents = list(zip(groups, tables, strict=True))
    for panel, (group, rows) in drawing.fill([group.name for group in groups], contents):
        number_axis(panel.axes, "x", around, log=True)
        draw_group(panel, group, rows, kind="point", ends=False, markers=True)
        panel.axes.set_xlabel(COMPUTE)
    drawing.value_axis(loss_label(final), drawing.panels)
    drawing.explain(groups)
    drawing.notes += means_note(final)
    return drawing.finish("Loss against training FLOPs")


def final_rows(group: Group, budgets: Budgets, column: str) -> pd.DataFrame:
    """Return the rows of `draw_group`: at each budget the mean over the seeds that remain."""
    tables: list[pd.DataFrame] = []
    for i, s in enumerate(group.series):
        for depth in group.depths:
            here = [run for run in s.runs if depth_of(run) == depth and not has_diverged(run)]
            at = {made_flops(seeds): seeds for seeds in by_value(here, budgets.get).values()}
            rows = points_of(at, partial(final_value, column=column)).drop(columns="by_seed")
            tables.append(rows.assign(line=i, depth=depth, curve=len(tables)))
    return pd.concat(tables, ignore_index=True)


def losses_by_flops(run: Run) -> pd.DataFrame:
    """Return the evaluations of a run, with its training FLOPs until then for the step."""
    return run.evals.assign(step=run.evals["step"] * float(run.meta["flops"]["step"]))


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
    sizes: set[float] = set()
    compares = False
    groups = drawing.setting_groups()
    for panel, group in drawing.fill([group.name for group in groups], groups):
        for budget in levels:
            here = [run for run in group.series[0].runs if budgets[run] == budget]
            members = by_value(here, partial(setting_value, key=size))
            rows = points_of(members, value).drop(columns="by_seed")
            if rows.empty:
                continue
            sizes |= set(rows["x"])
            compares |= len(rows) > 1
            label, colour = words_of(budget), colours[budget]
            style = {"marker": "o", "color": colour, "linestyle": "-"}
            panel.points(label, rows, style)
            finished = rows[rows["mark"] != "diverged"]
            if (least := least_loss(finished["x"].tolist(), finished["y"].tolist())) is None:
                continue
            panel.ring(*least, "least loss, by a parabola in log size", color=colour, zorder=4)
            panel.add(pd.DataFrame([least], columns=["x", "y"]), series=label, kind="minimum")
    if not compares:
        raise NothingMatchedError("no two depths or widths have nearly equal training FLOPs")
    drawing.depth_axes(sorted(map(int, sizes)), "width d_model" if size == WIDTH else None)
    drawing.value_axis(loss_label(runs), drawing.panels)
    for budget in levels:
        drawing.entry(words_of(budget), marker="o", color=colours[budget])
    drawing.notes += means_note(list(budgets))
    return drawing.finish(f"Loss at equal FLOPs against {'depth' if size == DEPTH else 'width'}")


def words_of(budget: float) -> str:
    """Return a budget as the label of a line: `1e+12 FLOPs`."""
    return f"{budget:.2g} FLOPs"
