"""Final losses with the fitted law L = E + c x^(-a), against depth, width or training FLOPs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from deepstack.analysis.captions import means_note
from deepstack.analysis.compute import WIDTH
from deepstack.analysis.scaling_law import LEAST, laws_by_setting
from deepstack.analysis.settings import depth_of, setting_value
from deepstack.analysis.statistics import final_value, loss_column, points_of
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart, in_style
from deepstack.plots.compute import COMPUTE
from deepstack.plots.drawing import Drawing
from deepstack.plots.loss import loss_label
from deepstack.plots.style import COLOURS, depth_axis, number_axis
from deepstack.records import Run

POINTS_OF_LAW = 60  # of a drawn curve


@chart("law_fit")
def law_fit(runs: list[Run], *, options: Options) -> Chart:
    """Final validation loss with its law E + c x^(-a) and a band, x depth, width or FLOPs."""
    return draw_law(runs, law_of(runs), options=options)


def law_of(runs: list[Run]) -> str:
    """Return the law that runs may have: of depth or width if these have enough values."""
    if len({depth_of(run) for run in runs}) >= LEAST:
        return "depth"
    widths = {setting_value(run, WIDTH) for run in runs}
    return "width" if len(widths) >= LEAST else "compute"


@in_style
def draw_law(runs: list[Run], law: str, *, options: Options) -> Chart:
    """Draw `laws_by_setting`, a panel a setting that has a law."""
    laws, notes = laws_by_setting(runs, law)
    shown = [(label, members, fit) for label, members, fit in laws if fit is not None]
    if not shown:
        raise NothingMatchedError(notes[0] if notes else f"no law of {law}")
    drawing = Drawing(runs, options)
    shown = drawing.at_most(shown)
    drawing.notes += notes
    labels = [label if len(shown) > 1 else None for label, _, _ in shown]
    for panel, (label, members, fit) in drawing.fill(labels, shown):
        column = loss_column([run for there in members.values() for run in there])
        rows = points_of(members, partial(final_value, column=column)).drop(columns="by_seed")
        style = {"marker": "o", "color": COLOURS[0], "linestyle": "none"}
        panel.points(label, rows, style)
        x = np.geomspace(min(members), max(members), POINTS_OF_LAW)
        curve = pd.DataFrame(dict(zip(("x", "y", "low", "high"), (x, *fit.curve(x)), strict=True)))
        panel.axes.plot(x, curve["y"], color=COLOURS[1])
        panel.axes.fill_between(x, curve["low"], curve["high"], color=COLOURS[1], alpha=0.18, lw=0)
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
    drawing.value_axis(loss_label(runs), drawing.panels)
    drawing.entry("mean over seeds", color=COLOURS[0], marker="o", ls="none")
    drawing.entry("law", color=COLOURS[1])
    words = "95 % of the laws of bootstrap samples"
    drawing.entry(words, patch=True, color=COLOURS[1], alpha=0.3, lw=0)
    drawing.notes += means_note(runs)
    x_name = {"depth": "depth", "width": "width", "compute": "training FLOPs"}[law]
    return drawing.finish(f"Law of the loss, E + c x$^{{-a}}$, x = {x_name}")
