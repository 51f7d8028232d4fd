"""What charts read off runs: means over seeds, levels to compare with, names of axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Options, Table
from deepstack.plots.page import Handle, typeset
from deepstack.plots.style import DIVERGED_MARKER, GREY, extent
from deepstack.records import Run
from deepstack.records.cells import counted

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import ArrayLike

# Two unrelated states that end in a norm are about √2·‖F_0‖ apart; above this part of it a
# state has lost most of what it was, and an update can hardly grow any more.
SATURATED = 0.3
SOME_DIVERGED = "some diverged"
ALL_DIVERGED = "all seeds diverged: last finite value"

LEVELS: dict[str, tuple[str, Any]] = {
    "unigram_entropy": ("unigram entropy", (0, (5, 1.6))),
    "context_free_entropy": ("best without context", (0, (1.2, 1.2))),
    "uniform_entropy": ("uniform guess", (0, (5, 1.4, 1.2, 1.4))),
    "bayes_loss": ("Bayes optimum", "-"),
}


class Spread(NamedTuple):
    """Mean over n seeds and mean ± one standard deviation; one seed has no spread."""

    mean: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Point:
    """The seeds of one series at one depth: what is drawn there, its mark if it has one, and the
    finite values that it is drawn of."""

    depth: int
    value: Spread
    mark: str
    by_seed: dict[int, float] = field(default_factory=dict)


def spread_of(values: Sequence[float]) -> Spread:
    found = np.asarray([v for v in values if math.isfinite(v)], dtype=float)
    if not len(found):
        return Spread(math.nan, math.nan, math.nan, 0)
    mean = float(found.mean())
    if len(found) == 1:
        return Spread(mean, math.nan, math.nan, 1)
    deviation = float(found.std(ddof=1))
    return Spread(mean, mean - deviation, mean + deviation, len(found))


def diverged(run: Run) -> bool:
    return run.state == "diverged"


def diverged_by(run: Run, step: int) -> bool:
    """Whether a run had diverged when this step was made: the last of its rows is where it did."""
    return diverged(run) and int(run.steps["step"].iloc[-1]) <= step


def diverged_seeds(shown: Iterable[tuple[str, Sequence[Run]]]) -> list[str]:
    """A note on which of some means, by name, have seeds that diverged."""
    said = []
    for name, runs in shown:
        if gone := sum(map(diverged, runs)):
            said.append(f"{name} ({gone} of {counted('{} seeds', len(runs))})")
    return [f"diverged: {'; '.join(said)}"] if said else []


def with_steps(runs: Sequence[Run]) -> list[Run]:
    """The runs that have made a step. Raises NothingMatchedError when there is none."""
    found = [run for run in runs if len(run.steps)]
    if not found:
        raise NothingMatchedError("no run has a step in steps.csv yet")
    return found


def shared_steps(runs: Sequence[Run]) -> list[int]:
    """The steps that all these runs have a row for."""
    shared = set(runs[0].steps["step"].tolist())
    for run in runs[1:]:
        shared &= set(run.steps["step"].tolist())
    return sorted(int(step) for step in shared)


def points_of(
    depths: Sequence[int],
    members: Callable[[int], list[Run]],
    value: Callable[[Run], float | None],
    ceiling: Callable[[Run], float] = lambda _: math.inf,
    gone: Callable[[Run], bool] = diverged,
) -> list[Point]:
    """The mean over the seeds of each depth that are not `gone`; where the value is None, of the
    others.

    A point is marked where some seeds are gone, and saturated when it lies above `ceiling`.  Where
    all are gone it is diverged: their last finite values, if `value` has them, and no mean of
    measurements.
    """
    points = []
    for depth in depths:
        there = members(depth)
        whole = [run for run in there if not gone(run)]
        found = [(run, v) for run in whole or there if (v := value(run)) is not None]
        mean = spread_of([v for _, v in found])
        if not mean.n:
            continue
        mark = ""
        if not whole:
            mean, mark = mean._replace(low=math.nan, high=math.nan), "diverged"
        elif len(whole) < len(there):
            mark = SOME_DIVERGED
        elif mean.mean > float(np.mean([ceiling(run) for run, _ in found])):
            mark = "saturated"
        by_seed = {int(run.get("seed", 0)): v for run, v in found if math.isfinite(v)}
        points.append(Point(depth, mean, mark, by_seed))
    return points


def draw_points(axes: Axes, points: Sequence[Point], style: dict[str, Any]) -> None:
    """A line through the points with its band; marked points are hollow, diverged ones alone."""
    joined = [point for point in points if point.mark != "diverged"]
    x = [point.depth for point in joined]
    axes.plot(x, [p.value.mean for p in joined], color=style["color"], ls=style["linestyle"])
    low, high = ([getattr(p.value, end) for p in joined] for end in ("low", "high"))
    draw_band(axes, x, low, high, style["color"])
    for point in points:
        marker = DIVERGED_MARKER if point.mark == "diverged" else style["marker"]
        axes.plot(
            point.depth,
            point.value.mean,
            marker=marker,
            color=style["color"],
            markerfacecolor="white" if point.mark else style["color"],
            markersize=5.2 if point.mark == "diverged" else None,
            linestyle="none",
            zorder=3,
        )


def draw_band(axes: Axes, x: ArrayLike, low: ArrayLike, high: ArrayLike, colour: Any) -> None:
    """The band between low and high where they are known; a bar where nothing beside it is."""
    at, bottom, top = (np.asarray(values, dtype=float) for values in (x, low, high))
    known = np.isfinite(bottom) & np.isfinite(top)
    axes.fill_between(at, bottom, top, where=known.tolist(), color=colour, alpha=0.18, lw=0)
    beside = np.concatenate(([False], known[:-1])) | np.concatenate((known[1:], [False]))
    lone = known & ~beside
    if lone.any():
        axes.vlines(at[lone], bottom[lone], top[lone], color=colour, alpha=0.3, lw=3)


def log_extent(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Limits of a log axis around the values of rows and their bands.

    A band that reaches down to zero has no end there: it is cut at a third of the least value.
    """
    middle = [row["y"] for row in rows if row.get("y") is not None and row["y"] > 0]
    least = min(middle, default=0.0) / 3
    edges = [row[key] for row in rows for key in ("low", "high") if row.get(key) is not None]
    return extent([*middle, *(max(edge, least) for edge in edges if math.isfinite(edge))])


def say_empty(axes: Axes) -> None:
    """Words in a panel that has nothing to draw."""
    axes.text(0.5, 0.5, "no value", color=GREY, ha="center", transform=axes.transAxes)


def mark_handles(
    marks: set[str], saturated: str = "saturated", gone: str = "diverged"
) -> list[Handle]:
    """Legend entries for the marks that were used; `gone`: what a cross says of divergence."""
    known = {
        "saturated": ("o", saturated),
        SOME_DIVERGED: ("o", "some seeds diverged: mean of the others"),
        "diverged": (DIVERGED_MARKER, gone),
    }
    return [
        Line2D([], [], color=GREY, mfc="white", ls="none", marker=marker, label=label)
        for mark, (marker, label) in known.items()
        if mark in marks
    ]


def axis_label(runs: Sequence[Run], name: str, words: str) -> str:
    """`model update ‖ΔF‖`, `loss L (nats)`: words, and the symbol and unit that the runs state."""
    for run in runs:
        for section in ("columns", "layers"):
            entry = run.columns.get(section, {}).get(name)
            if isinstance(entry, dict):
                unit = f" ({entry['unit']})" if entry.get("unit") else ""
                return f"{words} {typeset(str(entry.get('symbol', '')))}".rstrip() + unit
    return words


def reference_levels(runs: Sequence[Run], names: Sequence[str]) -> list[tuple[str, float]]:
    """The levels of these runs, name and value: one a distinct value, at most three a name."""
    levels: list[tuple[str, float]] = []
    for name in names:
        found: list[float] = []
        for run in runs:
            value = _reference(run, name)
            if value is not None and not any(abs(v / value - 1) < 0.01 for v in found if value):
                found.append(value)
        levels += [(name, value) for value in found[:3]]
    return levels


def draw_levels(
    axes: Axes, levels: Sequence[tuple[str, float]], table: Table, panel: str | None
) -> None:
    """Horizontal lines to compare a loss with."""
    for name, value in levels:
        axes.axhline(value, color=GREY, lw=0.9, ls=LEVELS[name][1], zorder=1.5)
        table.add(panel=panel, series=LEVELS[name][0], kind="level", y=value)


def level_handles(levels: Sequence[tuple[str, float]]) -> list[Handle]:
    """Legend entries for horizontal lines, with their values where a line has one only."""
    values: dict[str, set[float]] = {}
    for name, value in levels:
        values.setdefault(name, set()).add(value)
    return [
        Line2D(
            [],
            [],
            color=GREY,
            lw=0.9,
            ls=LEVELS[name][1],
            label=LEVELS[name][0] + (f" {min(found):.3g}" if len(found) == 1 else ""),
        )
        for name, found in values.items()
    ]


def overlay(
    axes: Axes, options: Options, chart: str, table: Table, panel: str | None
) -> list[Handle]:
    """Published values on top of the runs' own, as crosses; their legend entries."""
    if options.reference is None:
        return []
    rows = options.reference[options.reference["chart"] == chart]
    if "panel" in rows:
        rows = rows[rows["panel"].isna() | (rows["panel"] == panel)]
    handles: list[Handle] = []
    for i, (label, group) in enumerate(rows.groupby("label", sort=False)):
        line = axes.plot(
            group["x"],
            group["y"],
            color="#222222",
            marker="+x1234"[i % 6],
            ls=":",
            lw=0.7,
            label=str(label),
            zorder=2.5,
        )
        handles += line
        for _, row in group.iterrows():
            table.add(panel=panel, series=label, kind="reference", x=row["x"], y=row["y"])
    return handles


def last_row(table: pd.DataFrame, names: Sequence[str]) -> float | None:
    """The last finite value of the first of these columns that has one."""
    for name in names:
        if name in table:
            found = table[name].to_numpy(dtype=float)
            found = found[np.isfinite(found)]
            if len(found):
                return float(found[-1])
    return None


def _reference(run: Run, name: str) -> float | None:
    if name == "bayes_loss" and "optimal_loss" in run.evals:
        return last_row(run.evals, ["optimal_loss"])
    value = run.columns.get("references", {}).get(name)
    return float(value) if isinstance(value, (int, float)) else None
