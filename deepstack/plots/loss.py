"""Loss against step and against depth, next to losses that need no learning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.lines import Line2D

from deepstack.analysis.captions import caption_of, title_of
from deepstack.analysis.losses import (
    final_value,
    has_mask_loss,
    mask_note,
    training_levels,
    validation_levels,
)
from deepstack.analysis.series import Series, split_series
from deepstack.analysis.settings import TASK, depth_of
from deepstack.analysis.statistics import points_of, with_steps
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, Table, chart
from deepstack.plots.curves import (
    Curve,
    CurveStyles,
    Panel,
    band_handle,
    curves_of,
    draw_curve,
    grid,
    thin_out,
)
from deepstack.plots.page import Handle, Page
from deepstack.plots.style import GREY, depth_axis, log_axis, plain_axis, step_axis
from deepstack.plots.values import (
    ALL_DIVERGED,
    add_points,
    deviation_handle,
    draw_levels,
    draw_points,
    draw_reference,
    level_handles,
    line_styles,
    log_extent,
    mark_handles,
)
from deepstack.records import Run
from deepstack.records.cells import counted

TRAINING, VALIDATION = "training loss", "validation loss"
MOST_ROWS = 6
SHARED_PANEL = 3  # curves up to which training and validation loss share one panel


@chart("loss_vs_step")
def loss_vs_step(runs: list[Run], *, options: Options) -> Chart:
    """Training and validation loss against the step, with the levels that need no learning."""
    runs = with_steps(runs)
    series, depth_settings = split_series(runs)
    styles = CurveStyles(runs, series, options)
    curves = curves_of(series)
    shown = styles.panels(curves, MOST_ROWS)
    on_mask = has_mask_loss(runs)
    validation = VALIDATION + mask_note(runs)
    both = (TRAINING, validation) if any(len(run.evals) for run in runs) else (TRAINING,)
    if len(curves) <= SHARED_PANEL and len(shown) == 1:
        cells = [(shown[0], both)]
        columns = 1
    elif len(shown) == 1 or len(shown) > 4:
        cells = [(panel, (quantity,)) for panel in shown for quantity in both]
        columns = len(both)
    else:
        cells = [(panel, (quantity,)) for quantity in both for panel in shown]
        columns = len(shown)
    page = Page(len(cells) // columns, columns, height=1.9 if len(cells) <= 2 else 1.25)
    table = Table()
    levels: list[tuple[str, float]] = []
    published: list[Handle] = []
    stride = 1
    at_once: list[str] = []
    drawn: list[Curve] = []
    for axes, ((label, members), quantities) in zip(page.axes, cells, strict=True):
        words = [label] if label else []
        words += list(quantities) if len(quantities) == 1 else []
        name = ": ".join(words) or None
        axes.set_title(name or "")
        here = [run for curve in members for run in curve.runs]
        drawn_levels = training_levels(here) if TRAINING in quantities else []
        drawn_levels += [
            level
            for level in (validation_levels(here) if validation in quantities else [])
            if level not in drawn_levels
        ]
        draw_levels(axes, drawn_levels, table, name)
        levels += drawn_levels
        panel = Panel(axes, name, table)
        for curve in members:
            label, style = styles.label(curve), styles.style(curve)
            if TRAINING in quantities:
                points, every = thin_out(curve.points("loss"))
                stride = max(stride, every)
                draw_curve(panel, curve, label, points, style, kind="training")
                drawn += [curve] if len(points) else []
                if curve.diverged and not len(points):
                    at_once.append(label)
            if validation in quantities:
                points = curve.points("loss_masked" if on_mask else "loss", "evals")
                is_shared = len(quantities) > 1
                if is_shared:
                    colour = "black" if len(curves) == 1 else style["color"]
                    style = {"color": colour, "ls": "none", "mfc": "white", "zorder": 4}
                drawn += [curve] if len(points) else []
                draw_curve(
                    panel,
                    curve,
                    label,
                    points,
                    style,
                    kind="validation",
                    marker="o",
                    band=not is_shared,
                    ends=False,  # the last evaluation is not where it diverged
                )
        published = draw_reference(axes, options, "loss_vs_step", table, name) or published
    _axes(page, table)
    entries = styles.handles(drawn) if len(curves) > 1 else []
    if len(cells) == 1:
        colour = styles.style(curves[0])["color"] if len(curves) == 1 else GREY
        entries.append(Line2D([], [], color=colour, label=TRAINING))
        if len(both) > 1:
            colour = "black" if len(curves) == 1 else GREY
            mark = Line2D(
                [], [], color=colour, ls="none", marker="o", mfc="white", label=validation
            )
            entries.append(mark)
    entries += level_handles(levels)
    ended = [row for row in table.rows if row["kind"] == "training"]
    entries += mark_handles({row["mark"] for row in ended if row.get("mark")})
    entries += band_handle(table)
    notes = caption_of(runs, depth_settings) + styles.notes(len(shown))
    if stride > 1:
        notes.append(f"one step in {stride} of the training loss is drawn")
    if at_once:
        notes.append(f"diverged before any finite training loss: {', '.join(at_once)}")
    if not any(row["kind"] in ("training", "validation") for row in table.rows):
        raise NothingMatchedError("no run has a finite loss")
    title = "Loss against step"
    figure = page.finish(title, title_of(runs, series), notes, entries + published)
    return Chart(figure, table.frame(), title)


@chart("final_loss_vs_depth")
def final_loss_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """Validation loss at the end of training against depth, on [MASK] positions where there are.

    Each task has a separate panel, axis and levels, because losses of two tasks do not compare.
    """
    final = [run for run in runs if run.state in ("done", "diverged") and len(run.evals)]
    if not final:
        raise NothingMatchedError("no finished run has a validation loss")
    depths = sorted({depth_of(run) for run in final})
    if len(depths) < 2:
        raise NothingMatchedError(
            f"needs finished runs of two depths or more; all have N = {depths[0]}"
        )
    series, depth_settings = split_series(final)
    tasks: dict[str, list[tuple[Series, dict[str, Any]]]] = {}
    for s, style in zip(series, line_styles(series, options.runs), strict=True):
        tasks.setdefault(str(s.runs[0].get(TASK, "?")), []).append((s, style))
    table = Table()
    page = Page(*grid(len(tasks)), panels=len(tasks), height=2.0)
    levels: list[tuple[str, float]] = []
    counts, marks = [], set()
    handles: list[Handle] = []
    published: list[Handle] = []
    for axes, (task, members) in zip(page.axes, tasks.items(), strict=True):
        panel = f"task {task}" if len(tasks) > 1 else None
        axes.set_title(panel or "")
        here = [run for s, _ in members for run in s.runs]
        column = "loss_masked" if has_mask_loss(here) else "loss"
        levels += (known := validation_levels(here))
        draw_levels(axes, known, table, panel)
        for s, style in members:
            points = points_of(s.depths, s.at, partial(final_value, column=column))
            if not points:
                continue
            draw_points(axes, points, style)
            handles.append(Line2D([], [], **style, label=s.label))
            counts += [p.value.n for p in points if p.mark != "diverged"]
            marks |= {p.mark for p in points}
            add_points(table, panel, s.label, points)
        published = draw_reference(axes, options, "final_loss_vs_depth", table, panel) or published
        depth_axis(axes, depths)
        rows = [row for row in table.rows if row.get("panel") == panel]
        _loss_axis([axes], rows, _far_apart(rows))
        axes.set_ylabel(f"validation loss{mask_note(here)} (nats)")
    if not marks:
        raise NothingMatchedError("no finished run has a finite validation loss")
    handles += level_handles(levels) + mark_handles(marks, gone=ALL_DIVERGED)
    handles += deviation_handle(counts)
    notes = caption_of(final, depth_settings)
    if len(final) < len(runs):
        left = len(runs) - len(final)
        notes.append(f"left out: {counted('{} unfinished runs', left)}")
    title = "Final validation loss against depth"
    figure = page.finish(title, title_of(final, series), notes, handles + published)
    return Chart(figure, table.frame(), title)


def _axes(page: Page, table: Table) -> None:
    steps = [row["x"] for row in table.rows if row.get("x") is not None] or [1]
    for axes in page.axes:
        step_axis(axes, max(int(min(steps)), 0), int(max(steps)))
        axes.set_ylabel("loss (nats)")
    # A training loss that runs away must not flatten the validation losses beside it.
    groups = []
    for kind in ("training", "validation"):
        names = {row.get("panel") for row in table.rows if row["kind"] == kind}
        rows = [row for row in table.rows if row.get("panel") in names]
        drawn_levels = [axes for axes in page.axes if (axes.get_title(loc="left") or None) in names]
        groups.append((drawn_levels, rows))
    logarithmic = any(_far_apart(rows) for _, rows in groups)
    for drawn_levels, rows in groups:
        _loss_axis(drawn_levels, rows, logarithmic)
    for i, axes in enumerate(page.axes):
        before = page.axes[i - 1] if i % page.columns else None
        if before is not None:
            axes.set_ylabel("")
            same = before.get_ylim() == axes.get_ylim()
            axes.tick_params(labelleft=not same)
        if i + page.columns < len(page.axes):
            axes.set_xlabel("")


def _ends(rows: Sequence[dict[str, Any]]) -> list[float]:
    """The finite values of rows, their bands' too."""
    values = [row[key] for row in rows for key in ("y", "low", "high") if key in row]
    return [v for v in values if v is not None and math.isfinite(v)]


def _far_apart(rows: Sequence[dict[str, Any]]) -> bool:
    positive = [v for v in _ends(rows) if v > 0]
    return bool(positive) and max(positive) / min(positive) > 12


def _loss_axis(panels: Sequence[Any], rows: Sequence[dict[str, Any]], logarithmic: bool) -> None:
    """A plain axis, or a log one where losses lie far apart."""
    finite = _ends(rows)
    for axes in panels:
        if logarithmic:
            log_axis(axes, "y", *log_extent(rows))
        elif finite:
            plain_axis(axes, finite)
