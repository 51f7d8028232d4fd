"""Loss against training FLOPs and, at equal FLOPs, against depth or width; its fitted law."""

import math
from functools import partial

import numpy as np
import pandas as pd

from deepstack.plots import (
    COLOURS,
    Chart,
    Drawing,
    Group,
    Options,
    chart,
    curve_rows,
    depth_axis,
    draw_group,
    in_style,
    loss_label,
    number_axis,
    shades,
    typeset_power,
)
from deepstack.records import Run
from deepstack.runs import (
    DEPTH,
    WIDTH,
    Runs,
    by_value,
    depth_of,
    final_value,
    has_diverged,
    loss_column,
    means_note,
    points_of,
    require,
    vertex,
)
from deepstack.tools.laws.laws import (
    LEAST,
    Budgets,
    budgets_of,
    chosen_settings,
    laws_by_setting,
    made_flops,
    size_of_axis,
)

COMPUTE = "training FLOPs"
POINTS_OF_LAW = 60  # of a drawn curve


@chart("loss_vs_compute")
def loss_vs_compute(runs: Runs, *, options: Options) -> Chart:
    """Final validation loss against training FLOPs; with one budget a run, its loss on the way."""
    budgets = budgets_of(runs)
    final = Runs(budgets)
    drawing = Drawing(final, options, but=chosen_settings(budgets))
    groups = drawing.groups("curves")
    column = loss_column(final)
    tables = [final_rows(group, budgets, column) for group in groups]
    if max(rows.groupby(["line", "depth"])["x"].nunique().max() for rows in tables) < 2:
        tables = [curve_rows(group, column, losses_by_flops) for group in groups]
        tables = [
            drawing.above_zero(rows.query("mark != 'diverged'"), "x").assign(mark="")
            for rows in tables
        ]
        drawing.note("one budget: losses of the runs on their way to it")
    flops = pd.concat(tables)["x"]
    require(not flops.empty, "no run that did not diverge has a finite validation loss")
    around = [flops.min() / 1.5, flops.max() * 1.5]  # one budget needs an axis too
    contents = zip(groups, tables, strict=True)
    for panel, (group, rows) in drawing.arrange(contents, [group.name for group in groups]):
        number_axis(panel.axes, "x", around, log=True)
        draw_group(drawing, panel, group, rows, kind="point", ends=False, markers=True)
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
            rows = points_of(at, partial(final_value, column=column))
            tables.append(rows.assign(line=i, depth=depth, curve=len(tables)))
    return pd.concat(tables, ignore_index=True)


def losses_by_flops(run: Run) -> pd.DataFrame:
    """Return the evaluations of a run, with its training FLOPs until then for the step."""
    return run.evals.assign(step=run.evals["step"] * run.step_flops)


@chart("iso_flop")
def iso_flop(runs: Runs, *, options: Options) -> Chart:
    """Final validation loss at equal training FLOPs against depth, or width, a line a budget."""
    budgets = budgets_of(runs)
    final = Runs(budgets)
    size = size_of_axis(final)
    levels = sorted(set(budgets.values()))
    but = chosen_settings(budgets, [size] if size != DEPTH else [])
    drawing = Drawing(final, options, but=but)
    value = partial(final_value, column=loss_column(final))
    colours = shades(levels[::-1])
    sizes: set[float] = set()
    groups = drawing.groups("series")
    tables = []
    for group in groups:
        at = {b: [run for run in group.series[0].runs if budgets[run] == b] for b in levels}
        by_size = {b: by_value(here, lambda run: run.get(size)) for b, here in at.items()}
        tables.append({b: points_of(members, value) for b, members in by_size.items()})
    compares = any(len(rows) > 1 for table in tables for rows in table.values())
    require(compares, "no two depths or widths have nearly equal training FLOPs")
    for panel, table in drawing.arrange(tables, [group.name for group in groups]):
        for budget, rows in table.items():
            if rows.empty:
                continue
            sizes |= set(rows["x"])
            label, colour = budget_text(budget), colours[budget]
            style = {"marker": "o", "color": colour, "linestyle": "-"}
            panel.points(label, rows, style)
            x, y = rows[rows["mark"] != "diverged"][["x", "y"]].to_numpy(float).T
            if len(x) and (lowest := vertex((np.log(x), y))) is not None:
                least = math.exp(lowest[0]), lowest[1]
                panel.ring(*least, "least loss, by a parabola in log size", color=colour, zorder=4)
                panel.add(pd.DataFrame([least], columns=["x", "y"]), series=label, kind="minimum")
    drawing.depth_axes(sorted(map(int, sizes)), "width d_model" if size == WIDTH else None)
    drawing.value_axis(loss_label(final), drawing.panels)
    for budget in levels:
        drawing.entry(budget_text(budget), marker="o", color=colours[budget])
    drawing.notes += means_note(final)
    return drawing.finish(f"Loss at equal FLOPs against {'depth' if size == DEPTH else 'width'}")


def budget_text(budget: float) -> str:
    """Return a budget as the label of a line: `1e+12 FLOPs`."""
    return f"{budget:.2g} FLOPs"


@chart("law_fit")
def law_fit(runs: Runs, *, options: Options) -> Chart:
    """Final validation loss with its law E + c x^(-a) and a band, x depth, width or FLOPs."""
    depths, widths = ({run.get(key) for run in runs} for key in (DEPTH, WIDTH))
    law = "depth" if len(depths) >= LEAST else "width" if len(widths) >= LEAST else "compute"
    return draw_law(runs, law, options=options)


@partial(in_style, name="law_fit")
def draw_law(runs: Runs, law: str, *, options: Options) -> Chart:
    """Draw `laws_by_setting`, a panel a setting that has a law."""
    laws, notes = laws_by_setting(runs, law)
    require(laws, notes[0] if notes else f"no law of {law}")
    drawing = Drawing(runs, options)
    shown = drawing.at_most(laws)
    drawing.notes += notes
    labels = [label if len(shown) > 1 else None for label, _, _ in shown]
    used: list[Run] = []
    has_band = False
    for panel, (label, members, fit) in drawing.arrange(shown, labels):
        final = [run for there in members.values() for run in there]
        used += final
        rows = points_of(members, partial(final_value, column=loss_column(final)))
        style = {"marker": "o", "color": COLOURS[0], "linestyle": "none"}
        panel.points(label, rows, style)
        x = np.geomspace(min(members), max(members), POINTS_OF_LAW)
        y, low, high = fit.curve(x)
        panel.axes.plot(x, y, color=COLOURS[1])
        has_band |= bool(np.isfinite(low).all())
        panel.axes.fill_between(x, low, high, color=COLOURS[1], alpha=0.18, lw=0)
        curve = pd.DataFrame({"x": x, "y": y, "low": low, "high": high})
        panel.add(curve, {"color": COLOURS[1]}, series="law", kind="law")
        exponents = {"exponent": -fit.a.value, "exponent_low": -fit.a.high}
        exponents |= {"exponent_high": -fit.a.low, "n": fit.n, "seeds": fit.seeds}
        drawing.table.add(panel=panel.name, series="law", kind="fit", **exponents)
        drawing.note(f"{label}: a = {fit.a.text(3)}, E = {fit.E.text(3)}")
        if law == "compute":
            number_axis(panel.axes, "x", list(members), log=True)
            panel.axes.set_xlabel(COMPUTE)
        else:
            depth_axis(panel.axes, sorted(map(int, members)))
            if law == "width":
                panel.axes.set_xlabel("width d_model")
    drawing.value_axis(loss_label(used), drawing.panels)
    drawing.entry("mean over seeds", color=COLOURS[0], marker="o", ls="none")
    drawing.entry("law", color=COLOURS[1])
    if has_band:
        words = "95 % interval of the law over seeds"
        drawing.entry(words, patch=True, color=COLOURS[1], alpha=0.3, lw=0)
    drawing.notes += means_note(runs)
    x_name = {"depth": "depth", "width": "width", "compute": "training FLOPs"}[law]
    return drawing.finish(f"Law of the loss, E + c {typeset_power('x', '−a')}, x = {x_name}")
