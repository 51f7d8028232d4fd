"""Final losses with the fitted law L = E + c x^(-a), against depth, width or training FLOPs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepstack.analysis.compute import WIDTH
from deepstack.analysis.fit import signed
from deepstack.analysis.scaling_law import LEAST, laws_by_setting
from deepstack.analysis.settings import depth_of, setting_value
from deepstack.analysis.statistics import final_value, loss_column, mask_note, points_of
from deepstack.analysis.transfer import Interval
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart, in_style
from deepstack.plots.compute import COMPUTE, diverged_note
from deepstack.plots.curves import MOST_PANELS
from deepstack.plots.drawing import Drawing, draw_points, published
from deepstack.plots.loss import is_wide
from deepstack.plots.page import Handle
from deepstack.plots.style import COLOURS, depth_axis, extent, log_axis
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
        raise NothingMatchedError("; ".join(notes) or f"no law of {law}")
    drawing = Drawing(runs, options)
    if len(shown) > (most := drawing.limit(MOST_PANELS)):
        notes.append(f"{most} of {len(shown)} settings are shown")
    shown = shown[:most]
    labels = [label if len(shown) > 1 else None for label, _, _ in shown]
    for panel, (label, members, fit) in zip(drawing.add_panels(labels), shown, strict=True):
        column = loss_column([run for there in members.values() for run in there])
        rows = points_of(members, partial(final_value, column=column)).drop(columns="by_seed")
        style: dict[str, Any] = {"marker": "o", "color": COLOURS[0], "linestyle": "none"}
        draw_points(panel, rows, style, bars=True)
        panel.add(rows, series=label, kind="point")
        x = np.geomspace(min(members), max(members), POINTS_OF_LAW)
        y, low, high = fit.curve(x)
        panel.axes.plot(x, y, color=COLOURS[1])
        panel.axes.fill_between(x, low, high, color=COLOURS[1], alpha=0.18, lw=0)
        curve = pd.DataFrame({"x": x, "y": y, "low": low, "high": high})
        panel.add(curve, series="law", kind="law")
        exponents = {"exponent": -fit.a.value, "exponent_low": -fit.a.high}
        exponents |= {"exponent_high": -fit.a.low, "n": fit.n, "seeds": fit.seeds}
        drawing.table.add(panel=panel.name, series="law", kind="fit", **exponents)
        notes.append(f"{label}: a = {with_interval(fit.a)}, E = {with_interval(fit.E)}")
        published(panel)
        if law == "compute":
            log_axis(panel.axes, "x", *extent(list(members)))
            panel.axes.set_xlabel(COMPUTE)
        else:
            depth_axis(panel.axes, sorted(map(int, members)))
            if law == "width":
                panel.axes.set_xlabel("width d_model")
    log = is_wide(drawing, drawing.panels)
    drawing.value_axis(f"validation loss{mask_note(runs)} (nats)", drawing.panels, log=log)
    handles: list[Handle] = [
        Line2D([], [], color=COLOURS[0], marker="o", ls="none", label="mean over seeds"),
        Line2D([], [], color=COLOURS[1], label="law"),
        Patch(color=COLOURS[1], alpha=0.3, lw=0, label="95 % of the laws of bootstrap samples"),
    ]
    x_name = {"depth": "depth", "width": "width", "compute": "training FLOPs"}[law]
    title = f"Law of the loss, E + c x$^{{-a}}$, x = {x_name}"
    return drawing.finish(title, [*notes, *diverged_note(runs)], handles)


def with_interval(value: Interval) -> str:
    """Return a number with its interval: `0.142 (0.138 to 0.145)`."""
    return f"{signed(value.value, 3)} ({signed(value.low, 3)} to {signed(value.high, 3)})"
