"""Draws maps and stacks again from their CSV: outcomes, frontiers, heat maps and shares."""

from typing import Any

import pandas as pd
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from deepstack.instruments.attribution import ROLE_COLOURS
from deepstack.plots import (
    CELL_GAP,
    DASHES,
    OUTCOME_COLOURS,
    ROW_HEIGHT,
    Chart,
    Legend,
    Page,
    Panel,
    Table,
    axis_number,
    depth_axis,
    map_axes,
    number_axis,
    untypeset,
)
from deepstack.runs import OUTCOME_WORDS, Fit

CELLS = {
    "effects": ("Effect of removing a layer on later layers", "removed layer s", "later layer l",
                "relative change of its contribution"),
    "layer_similarity": ("Similarity of the stream after two layers", "layer l", "layer m",
                         "linear CKA"),
}  # fmt: skip
"""Chart -> title, labels of its axes and of its colours."""
SUM = "sum of parts / whole"
RATE_ROW = 0.15  # height in inches of a row of a frontier
EDGE: dict[str, Any] = {"color": "#D01C1C", "lw": 1.6, "zorder": 3, "solid_capstyle": "butt"}


def draw_outcomes(rows: pd.DataFrame, entry: dict[str, str]) -> Chart:
    """Return the map of outcomes in a CSV: a box for each series and depth, split among seeds."""
    names = list(dict.fromkeys(rows["series"]))
    panels = list(dict.fromkeys(rows["panel"]))
    page = Page(1, len(panels), height=max(0.3, ROW_HEIGHT * len(names)))
    title = "Which settings learn, at each depth"
    return boxes(rows.assign(row=rows["series"]), names, page, title, entry)


def draw_frontier(rows: pd.DataFrame, entry: dict[str, str]) -> Chart:
    """Return the map of outcomes over depth and rate, with the largest rate that learns."""
    rates = sorted(set(rows["y"].dropna()), reverse=True)
    panels = list(dict.fromkeys(rows["panel"]))
    page = Page(-(-len(panels) // 3), 3, panels=len(panels), height=RATE_ROW * len(rates))
    title = "The largest learning rate that learns, against depth"
    named = rows.assign(row=rows["y"].map(axis_number, na_action="ignore"))
    return boxes(named, list(map(axis_number, rates)), page, title, entry)


def boxes(
    rows: pd.DataFrame, names: list[str], page: Page, title: str, entry: dict[str, str]
) -> Chart:
    """Return a chart of boxes in categories, each divided among its seeds.

    rows: those of the CSV, and `row`, the name of the row that a box is in.
    """
    table, legend = Table(), Legend()
    depths = sorted(set(rows["x"]))
    panels = list(dict.fromkeys(rows["panel"]))
    has_edges = False
    for axes, name in zip(page.axes, panels, strict=True):
        axes.set_title(name)
        panel = Panel(axes, name, table, legend)
        map_axes(axes, depths, names, page.width / page.columns)
        if "y" in rows:
            axes.set_ylabel("learning rate")
        here = rows[rows["panel"] == name]
        for (row, x), cell in here[here["kind"] != "frontier"].groupby(["row", "x"], sort=False):
            left, y = depths.index(x) - 0.5 + CELL_GAP / 2, names.index(row) - 0.5 + CELL_GAP
            for one in cell.to_dict("records"):
                share = (1 - CELL_GAP) * one["n"] / cell["n"].sum()
                style: Any = {"color": OUTCOME_COLOURS[one["kind"]], "lw": 0}
                axes.add_patch(Rectangle((left, y), share, 1 - 2 * CELL_GAP, zorder=2, **style))
                left += share
        for edge in here[here["kind"] == "frontier"].to_dict("records"):
            if edge["row"] in names:
                x, top = depths.index(edge["x"]), names.index(edge["row"]) - 0.5
                axes.plot([x - 0.5, x + 0.5], [top, top], clip_on=False, **EDGE)
                has_edges = True
        panel.add(here.drop(columns=["panel", "row"]))
    for kind, colour in OUTCOME_COLOURS.items():
        if kind in set(rows["kind"]):
            legend.entry(OUTCOME_WORDS[kind], patch=True, color=colour, lw=0)
    if has_edges:
        legend.entry("largest rate at which all seeds learn", **EDGE)
    return finished(page, table, title, entry, legend)


def draw_cells(rows: pd.DataFrame, entry: dict[str, str], name: str) -> Chart:
    """Return the heat maps of a CSV; values above 1 are drawn as 1.  name: of the chart."""
    title, x_label, y_label, words = CELLS[name]
    panels = list(dict.fromkeys(rows["panel"]))
    across = 2 if len(panels) == 4 else min(len(panels), 3)
    page = Page(-(-len(panels) // across), across, panels=len(panels), height=1.5)
    table, legend, scale = Table(), Legend(), Normalize(0, 1)
    for axes, one in zip(page.axes, panels, strict=True):
        values = rows[rows["panel"] == one].pivot(index="x", columns="y", values="value")
        panel = Panel(axes, one, table, legend)
        mesh = panel.heat_map(
            values.index.to_numpy(), values.to_numpy(float), scale, values.columns.to_numpy()
        )
        axes.set(title=one, xlabel=x_label, ylabel=y_label)
    page.colour_bar(mesh, words)
    return finished(page, table, title, entry, legend)


def draw_shares(rows: pd.DataFrame, entry: dict[str, str]) -> Chart:
    """Return the stacks of the roles' shares in a CSV, and below each the sum over the whole."""
    panels = list(dict.fromkeys(rows["panel"]))
    page = Page(2, len(panels), height=1.35)
    table, legend = Table(), Legend()
    depths = [int(x) for x in sorted(set(rows["x"].dropna()))]
    legend.entry("parts add up to the whole", color="black", ls=DASHES[1], lw=0.9)
    ratios = rows[rows["kind"] == "ratio"]
    for i, name in enumerate(panels):
        above, below = (Panel(page.axes[at], name, table, legend) for at in (i, i + len(panels)))
        here, base = rows[rows["panel"] == name], None
        for role, part in here[here["kind"] == "share"].groupby("series", sort=False):
            top = part["y"].to_numpy() + (0 if base is None else base)
            if role != "whole":
                style: Any = {"color": ROLE_COLOURS[str(role)], "lw": 0}
                above.axes.fill_between(part["x"], 0 if base is None else base, top, **style)
                legend.entry(str(role).replace("_", " "), patch=True, **style)
                base = top
            above.add(part.drop(columns=["panel", "series"]), series=str(role))
        line = here[here["kind"] == "ratio"].drop(columns=["panel", "series", "kind"])
        below.lines(SUM, line, kind="ratio", color="black", marker="o", ms=2.5)
        below.axes.axhline(1, color="black", ls=DASHES[1], lw=0.9)
        for fit in here[here["kind"] == "fit"].to_dict("records"):
            numbers = fit["exponent"], fit["standard_error"], float("nan")
            made = Fit(*numbers, int(fit["n"]), int(fit["seeds"]))
            above.add_fit(fit["series"], made, name, fit["series"].replace("_", " "))
        above.axes.set(title=name, ylim=(0, 1))
        above.axes.tick_params(labelbottom=False)
        for panel in (above, below):
            depth_axis(panel.axes, depths)
        number_axis(below.axes, "y", [*ratios["low"], *ratios["high"]], log=False)
        above.axes.set(xlabel="", ylabel="part / sum of parts")
        below.axes.set_ylabel(SUM)
    legend.entry(SUM, color="black", marker="o", ms=2.5)
    legend.entry("whole", ls="none", color="black")
    exponents, _ = legend.add_exponents()
    title = "Where the model update comes from, against depth"
    return finished(page, table, title, entry, legend, exponents)


def finished(
    page: Page,
    table: Table,
    title: str,
    entry: dict[str, str],
    legend: Legend,
    legend_title: str | None = None,
) -> Chart:
    """Return the chart of a page with the texts of figures.yaml."""
    handles, settings = legend.all_handles(), entry["settings"]
    figure = page.finish(title, entry["subtitle"], (), handles, legend_title, settings)
    lines = [f"{title}. {entry['subtitle']}.", settings, *entry.get("caption", "").split(" · ")]
    return Chart(figure, table.frame(), title, untypeset("\n".join([*lines, ""])))
