"""Loss against learning rate, a curve a depth: is the best rate at one depth so at others?"""

from __future__ import annotations

import math
from typing import Any

from matplotlib.lines import Line2D

from deepstack.analysis.captions import caption_of, title_of
from deepstack.analysis.losses import final_loss, has_mask_loss, mask_note, validation_levels
from deepstack.analysis.outcomes import map_cells
from deepstack.analysis.series import one_run_per_seed
from deepstack.analysis.settings import depth_of
from deepstack.analysis.statistics import SOME_DIVERGED, Spread, has_diverged
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, Table, chart
from deepstack.plots.curves import grid
from deepstack.plots.frontier import LR, lr_of
from deepstack.plots.page import Handle, Page
from deepstack.plots.style import GREY, extent, log_axis, plain_axis, shade
from deepstack.plots.values import (
    deviation_handle,
    draw_levels,
    draw_line,
    level_handles,
    mark_handles,
)
from deepstack.records import Run
from deepstack.records.cells import counted


@chart("loss_vs_lr")
def loss_vs_lr(runs: list[Run], *, options: Options) -> Chart:
    """Final validation loss against the learning rate, a curve a depth, the best rate of each."""
    final = [run for run in runs if run.state in ("done", "diverged") and len(run.evals)]
    if len({lr_of(run) for run in final}) < 2:
        raise NothingMatchedError("needs finished runs of two learning rates or more")
    column = "loss_masked" if has_mask_loss(final) else "loss"
    names = map_cells(final, but=[LR])
    panels: dict[str, dict[int, dict[float, list[Run]]]] = {}
    for run in sorted(final, key=lambda run: (depth_of(run), lr_of(run))):
        cell = names[str(run.path)]
        name = cell.name
        panels.setdefault(name, {}).setdefault(depth_of(run), {}).setdefault(lr_of(run), [])
        members = panels[name][depth_of(run)][lr_of(run)]
        members[:] = one_run_per_seed([*members, run])
    unfinished = [name for name, by_depth in panels.items() if not any(
        final_loss(runs, column).n for by_rate in by_depth.values() for runs in by_rate.values())
    ]  # fmt: skip
    panels = {name: losses for name, losses in panels.items() if name not in unfinished}
    if not panels:
        raise NothingMatchedError("every run diverged, or has no finite validation loss")
    depths = sorted({depth for by_depth in panels.values() for depth in by_depth})
    page = Page(*grid(len(panels)), panels=len(panels), height=1.9)
    table, counts = Table(), []
    levels: list[tuple[str, float]] = []
    for axes, (panel, by_depth) in zip(page.axes, panels.items(), strict=True):
        axes.set_title(panel if len(panels) > 1 else "")
        runs = [
            run for by_rate in by_depth.values() for losses in by_rate.values() for run in losses
        ]
        levels += (here := validation_levels(runs))
        draw_levels(axes, here, table, panel)
        for depth, by_rate in by_depth.items():
            losses = {rate: final_loss(members, column) for rate, members in by_rate.items()}
            partly = {r for r in losses if any(map(has_diverged, by_rate[r]))}
            undiverged = [r for r in losses if losses[r].n and r not in partly]
            best = min(undiverged, key=lambda r: losses[r].mean, default=None)
            colour = shade(len(depths) - 1 - depths.index(depth), len(depths))
            draw(axes, losses, best, partly, colour)
            counts += [summary.n for summary in losses.values() if summary.n]
            for rate, summary in losses.items():
                count = sum(map(has_diverged, by_rate[rate]))
                table.add(panel=panel, series=f"N = {depth}", kind="best" if rate == best else
                          "point", x=rate, y=summary.mean, low=summary.low, high=summary.high,
                          n=summary.n, mark=f"{count} diverged" if count else None)  # fmt: skip
    rows = [row for row in table.rows if row["kind"] in ("point", "best")]
    finite = [row[key] for row in rows for key in ("y", "low", "high") if math.isfinite(row[key])]
    finite += [level for _, level in levels]
    low, high = extent([row["x"] for row in rows])
    for axes in page.axes:
        log_axis(axes, "x", low, high)
        plain_axis(axes, finite)
        axes.set_xlabel("learning rate")
        axes.set_ylabel(f"validation loss{mask_note(final)} (nats)")
    page.outer_labels_only()
    handles: list[Handle] = [
        Line2D([], [], marker="o", color=shade(len(depths) - 1 - i, len(depths)), label=f"N = {n}")
        for i, n in enumerate(depths)
        if any(row["n"] and row["series"] == f"N = {n}" for row in rows)
    ]
    if any(row["kind"] == "best" for row in rows):
        ring = Line2D([], [], ls="none", marker="o", ms=9, mfc="none", mec=GREY, label="best")
        handles.append(ring)
    if any(row["mark"] and row["n"] for row in rows):
        handles += mark_handles({SOME_DIVERGED})
    handles += level_handles(levels)
    handles += deviation_handle(counts)
    notes = caption_of(final)
    if diverged := sum(map(has_diverged, final)):
        left = counted("{} diverged runs", diverged)
        notes.append(f"left out: {left}; best is among rates without one")
    if unfinished:
        notes.append(f"nothing finished of {', '.join(unfinished)}")
    title = "Final validation loss against learning rate"
    figure = page.finish(title, title_of(final, ()), notes, handles)
    return Chart(figure, table.frame(), title)


def draw(
    axes: Any, losses: dict[float, Spread], best: float | None, partly: set[float], colour: Any
) -> None:
    """Draw a curve with its band, a ring around its best point, hollow where a seed diverged."""
    rates = [rate for rate in losses if losses[rate].n]
    draw_line(axes, rates, [losses[r] for r in rates], color=colour, marker="o", ms=3, lw=1)
    point: dict[str, Any] = {"marker": "o", "color": colour, "ls": "none"}
    for rate in partly.intersection(rates):
        axes.plot(rate, losses[rate].mean, ms=3.8, mfc="white", **point)
    if best is not None:
        axes.plot(best, losses[best].mean, ms=9, mfc="none", **point)
