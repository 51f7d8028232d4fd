"""The sharpness of the loss against the step, beside the threshold of the optimizer."""

from __future__ import annotations

from matplotlib.lines import Line2D

from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.curves import MOST_PANELS, Arrangement, curve_rows
from deepstack.plots.drawing import Drawing, axis_label, published
from deepstack.plots.page import Handle
from deepstack.plots.style import DASHES, GREY, step_axis
from deepstack.records import Run

SHARPNESS, THRESHOLD = "preconditioned_sharpness", "stability_threshold"


@chart("sharpness_vs_step")
def sharpness_vs_step(runs: list[Run], *, options: Options) -> Chart:
    """Sharpness of the preconditioned loss against the step, and the optimizer's threshold."""
    measured = [run for run in runs if len(run.sharpness)]
    if not measured:
        raise NothingMatchedError("no run has a sharpness.csv (log.sharpness_every is 0?)")
    drawing = Drawing(measured, options)
    arrangement = Arrangement(drawing)
    shown, notes = arrangement.panels(MOST_PANELS)
    curves, thresholds = (
        curve_rows(drawing.series, column, "sharpness").query("x > 0")
        for column in (SHARPNESS, THRESHOLD)
    )
    if not (curves["y"] > 0).any():
        raise NothingMatchedError("no run has a preconditioned sharpness above 0 after a step")
    for panel, (_, query, _) in zip(
        drawing.add_panels([name for name, _, _ in shown]), shown, strict=True
    ):
        style = {"ls": DASHES[1], "lw": 0.8, "band": False, "ends": False}
        arrangement.draw(panel, thresholds.query(query), kind="level", **style)
        arrangement.draw(panel, curves.query(query).query("y > 0"))
        published(panel)
    steps = drawing.rows()["x"]
    label = axis_label(measured, SHARPNESS, "preconditioned sharpness")
    drawing.value_axis(label, drawing.panels)
    for panel in drawing.panels:
        step_axis(panel.axes, int(steps.min()), int(steps.max()))
    entries: list[Handle] = []
    if len(measured) > 1:
        entries, more = arrangement.handles(curves)
        notes += more
    dashed = Line2D([], [], color=GREY, ls=DASHES[1], lw=0.8, label="stability threshold")
    if left := len(runs) - len(measured):
        notes.append(f"left out: {left} of {len(runs)} runs without log.sharpness_every")
    return drawing.finish("Sharpness against step", notes, [*entries, dashed])
