"""How many steps of composition a stack has learned, against its depth."""

from __future__ import annotations

from functools import partial

from matplotlib.lines import Line2D

from deepstack.analysis.settings import depths_of
from deepstack.analysis.statistics import final_value, points_of
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.drawing import MOST_BANDS, Drawing, axis_label, points, published
from deepstack.plots.page import Handle
from deepstack.plots.style import depth_axis
from deepstack.records import Run
from deepstack.records.cells import counted


@chart("solved_vs_depth")
def solved_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """The largest k that a stack solves against depth, for tasks whose answers take k steps."""
    answered = [run for run in runs if "solved" in run.evals]
    if not answered:
        raise NothingMatchedError("no run has a task with k steps (`hops`, `group`)")
    final = [run for run in answered if run.state in ("done", "diverged") and len(run.evals)]
    depths = depths_of(final, "finished runs")
    drawing = Drawing(final, options)
    groups = drawing.groups()
    handles: list[Handle] = []
    panels = drawing.add_panels([name or None for name, _ in groups])
    for panel, (_, members) in zip(panels, groups, strict=True):
        for i in members:
            series, style = drawing.series[i], drawing.styles[i]
            rows = points_of(series.by_depth, partial(final_value, column="solved"))
            points(panel, series.label, rows, style, bars=len(members) > MOST_BANDS)
            handles.append(Line2D([], [], **style, label=series.label))
        published(panel)
        depth_axis(panel.axes, depths)
    label = axis_label(final, "solved", "largest k solved").removesuffix(" k")
    drawing.value_axis(label, panels, log=False, include=0.0)
    notes = ["solved: every accuracy up to k is above 0.95"]
    if left := len(runs) - len(final):
        notes.append(f"left out: {counted('{} runs', left)} unfinished or of other tasks")
    return drawing.finish("Largest k solved against depth", notes, handles)
