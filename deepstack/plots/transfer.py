"""Loss against learning rate, a curve a depth: is the best rate at one depth so at others?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.lines import Line2D

from deepstack.analysis.losses import final_value, loss_column, mask_note, validation_levels
from deepstack.analysis.outcomes import map_table
from deepstack.analysis.statistics import SOME_DIVERGED, has_diverged
from deepstack.analysis.tidy import seed_statistics
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.draw import Drawing, draw_band
from deepstack.plots.loss import draw_levels
from deepstack.plots.page import Handle
from deepstack.plots.style import GREY, extent, log_axis, shade
from deepstack.records import Run
from deepstack.records.cells import counted


@chart("loss_vs_lr")
def loss_vs_lr(runs: list[Run], *, options: Options) -> Chart:
    """Final validation loss against the learning rate, a curve a depth, the best rate of each."""
    final = [run for run in runs if run.state in ("done", "diverged") and len(run.evals)]
    table = map_table(final, by_lr=True) if final else None
    if table is None or table["lr"].nunique() < 2:
        raise NothingMatchedError("needs finished runs of two learning rates or more")
    column = loss_column(final)
    table["gone"] = [has_diverged(run) for run in table["run"]]
    losses = [math.nan if has_diverged(run) else final_value(run, column) for run in table["run"]]
    table["value"] = np.array(losses, dtype=float)
    table = table.sort_values(["depth", "lr"], kind="stable")
    finite = set(table["name"][np.isfinite(table["value"])])
    unfinished = [name for name in dict.fromkeys(table["name"]) if name not in finite]
    table = table[table["name"].isin(finite)]
    if table.empty:
        raise NothingMatchedError("every run diverged, or has no finite validation loss")
    depths = sorted(set(table["depth"]))
    colours = {n: shade(len(depths) - 1 - i, len(depths)) for i, n in enumerate(depths)}
    drawing = Drawing(final, options)
    names = list(dict.fromkeys(table["name"]))
    titles = names if len(names) > 1 else [""]
    for panel in drawing.add_panels(names, titles=titles, height=1.9):
        here = table[table["name"] == panel.name]
        draw_levels(panel, validation_levels(here["run"].tolist()))
        for depth, members in here.groupby("depth"):
            rows, series = seed_statistics(members, "lr"), f"N = {depth}"
            gone = members.groupby("lr")["gone"].sum()
            rows = rows.set_index("x").reindex(gone.index).rename_axis("x").reset_index()
            rows["n"] = rows["n"].fillna(0).astype(int)
            rows["mark"] = [f"{count} diverged" if count else None for count in gone]
            drawn = rows[rows["n"] > 0]
            undiverged = drawn[drawn["mark"].isna()]
            best = [undiverged["y"].idxmin()] if len(undiverged) else []
            rows["kind"] = np.where(rows.index.isin(best), "best", "point")
            panel.add(rows, series=series)
            colour = colours[depth]
            panel.axes.plot(drawn["x"], drawn["y"], color=colour, marker="o", ms=3, lw=1)
            draw_band(panel, drawn, colour)
            point: dict[str, Any] = {"marker": "o", "color": colour, "ls": "none"}
            hollow = drawn[drawn["mark"].notna()]
            panel.axes.plot(hollow["x"], hollow["y"], ms=3.8, mfc="white", **point)
            drawing.marks |= {SOME_DIVERGED} if len(hollow) else set()
            ring = rows.loc[best]
            panel.axes.plot(ring["x"], ring["y"], ms=9, mfc="none", **point)
    rows = drawing.rows("point", "best")
    drawing.value_axis(f"validation loss{mask_note(final)} (nats)", drawing.panels, log=False)
    for panel in drawing.panels:
        log_axis(panel.axes, "x", *extent(rows["x"].tolist()))
        panel.axes.set_xlabel("learning rate")
    handles: list[Handle] = [
        Line2D([], [], marker="o", color=colour, label=f"N = {depth}")
        for depth, colour in colours.items()
        if (rows["n"] * (rows["series"] == f"N = {depth}")).any()
    ]
    if (rows["kind"] == "best").any():
        look: Any = {"ls": "none", "marker": "o", "ms": 9, "mfc": "none", "mec": GREY}
        handles.append(Line2D([], [], label="best", **look))
    notes = []
    if diverged := sum(map(has_diverged, final)):
        left = counted("{} diverged runs", diverged)
        notes.append(f"left out: {left}; best is among rates without one")
    if unfinished:
        notes.append(f"nothing finished of {', '.join(unfinished)}")
    return drawing.finish("Final validation loss against learning rate", notes, handles)
