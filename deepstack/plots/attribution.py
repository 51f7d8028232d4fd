"""Shares of the roles in the model update, against depth with exponents and against the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepstack.analysis.captions import caption_of, diverged_note, title_of
from deepstack.analysis.fit import Fit, exponent_title, power_law_of_seeds
from deepstack.analysis.series import Series, choose_panels, choose_series, split_series
from deepstack.analysis.statistics import (
    SATURATED,
    Spread,
    has_diverged,
    spread_of,
    unrelated_distance,
)
from deepstack.config import ROLES
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, Table, chart
from deepstack.plots.curves import band_handle
from deepstack.plots.page import Handle, Page, typeset
from deepstack.plots.style import depth_axis, log_axis, shade, step_axis
from deepstack.plots.values import DASHED, add_fit, draw_line, log_extent
from deepstack.records import Run

if TYPE_CHECKING:
    import pandas as pd

MOST_PANELS = 4
SCHEDULE = "schedule"

# Blue: matrices of the theorem; red: vectors beside the matrices; green: outside of layers.
COLOURS = {
    "q": "#DCE9F5", "k": "#BCD4EA", "v": "#94BEDD", "o": "#61A0CD", "w1": "#327FBA",
    "w2": "#0E559B", "w3": "#0A2F66", "cross_q": "#E4E1F0", "cross_k": "#C6C3E0",
    "cross_v": "#A19BC9", "cross_o": "#6F5BA6", "bias": "#FBD9B5", "norm_gain": "#F29A4A",
    "norm_bias": "#C8500A", "final_norm": "#7A2A04", "scheme": "#333333", "embedding": "#8CCB9B",
    "position": "#2E8B57", "head": "#C9C9C9", SCHEDULE: "#888888",
}  # fmt: skip


@dataclass(frozen=True)
class Stacked:
    """One panel: at each x the means over seeds of every role's part and share, and of the ratio
    of the parts' sum to the whole.

    shares, parts: role -> one value per x.  by_seed: role, or 'whole' -> the values of the seeds at
    each x.
    """

    name: str
    x: list[int]
    shares: dict[str, list[float]]
    parts: dict[str, list[float]]
    whole: list[float]
    ratio: list[Spread]
    by_seed: dict[str, list[dict[int, float]]]


def tables_of(runs: Sequence[Run]) -> dict[Run, pd.DataFrame]:
    """The runs that have an attribution.csv with a row.  Raises NothingMatchedError for none."""
    tables = {run: run.attribution for run in runs if len(run.attribution)}
    if not tables:
        raise NothingMatchedError("no run has an attribution.csv (log.attribution_every is 0?)")
    return tables


def stack(name: str, groups: Sequence[tuple[int, pd.DataFrame]]) -> Stacked:
    """The means over the rows of each group, one a seed.  A row in which nothing moved is none."""
    names = parts_of([rows for _, rows in groups])
    stacked = Stacked(name, [], {r: [] for r in names}, {r: [] for r in names}, [], [], {})
    for x, rows in groups:
        parts = rows.reindex(columns=names).fillna(0.0).to_numpy(float)
        whole = rows["whole"].to_numpy(float)
        sums = parts.sum(axis=1)
        good = np.isfinite(sums) & (sums > 0) & np.isfinite(whole) & (whole > 0)
        if not good.any():
            continue
        parts, sums, whole = parts[good], sums[good], whole[good]
        stacked.x.append(x)
        stacked.whole.append(float(whole.mean()))
        seeds = rows["seed"].to_numpy(int)[good].tolist()
        for role, values in zip((*names, "whole"), (*parts.T, whole), strict=True):
            by_seed = dict(zip(seeds, values.tolist(), strict=True))
            stacked.by_seed.setdefault(role, []).append(by_seed)
        stacked.ratio.append(spread_of((sums / whole).tolist()))
        for i, role in enumerate(names):
            stacked.parts[role].append(float(parts[:, i].mean()))
            stacked.shares[role].append(float((parts[:, i] / sums).mean()))
    return stacked


def parts_of(tables: Sequence[pd.DataFrame]) -> list[str]:
    """The parts that make up the whole: roles, or the groups that a probed model was given."""
    known = [role for role in (*ROLES, SCHEDULE) if any(role in rows for rows in tables)]
    if known:
        return known
    names = dict.fromkeys(str(name) for rows in tables for name in rows)
    return [name for name in names if name not in ("step", "seed", "whole", "unexplained")]


def colours_of(roles: Sequence[str]) -> list[Any]:
    """A colour for each: a role's own, or for groups dark to light."""
    return [COLOURS.get(role, shade(i, len(roles))) for i, role in enumerate(roles)]


def draw_stacks(page: Page, stacks: Sequence[Stacked], roles: Sequence[str], table: Table) -> None:
    """Draw shares in the upper row of panels, and the sum of the parts over the whole below."""
    columns = len(stacks)
    ratios = [{"y": r.mean, "low": r.low, "high": r.high} for s in stacks for r in s.ratio]
    low, high = log_extent([{"y": 1.0}, *ratios])
    for i, one in enumerate(stacks):
        above, below = page.axes[i], page.axes[columns + i]
        above.set_title(one.name)
        heights = [one.shares.get(role, [0.0] * len(one.x)) for role in roles]
        colours = colours_of(roles)
        above.stackplot(one.x, heights, colors=colours, edgecolor="white", linewidth=0.25)
        above.set_ylim(0, 1)
        above.grid(False)
        draw_ratio(below, one)
        log_axis(below, "y", low, high)
        record(table, one, roles)
    page.axes[0].set_ylabel("share: part / sum of parts")
    page.axes[columns].set_ylabel("sum of parts / whole")
    for i, axes in enumerate(page.axes):
        if i < columns:
            axes.tick_params(labelbottom=False)
            axes.set_xlabel("")
        if i % columns:
            axes.tick_params(labelleft=False)


def draw_ratio(axes: Axes, one: Stacked) -> None:
    """The sum of the parts over the whole, with its band, and a line at 1."""
    axes.axhline(1.0, zorder=1.5, **DASHED)
    marker = "o" if len(one.x) <= 24 else None
    draw_line(axes, one.x, one.ratio, color="black", marker=marker, ms=2.4)


def record(table: Table, one: Stacked, roles: Sequence[str]) -> None:
    """Add the drawn values to the table; the value of a share is its part, of a ratio the whole."""
    for i, x in enumerate(one.x):
        n = one.ratio[i].n
        for role in roles:
            if role in one.shares:
                table.add(
                    panel=one.name, series=role, kind="share", x=x, n=n,
                    y=one.shares[role][i], value=one.parts[role][i],
                )  # fmt: skip
        table.add(
            panel=one.name, series="sum of parts / whole", kind="ratio", x=x, n=n,
            y=one.ratio[i].mean, low=one.ratio[i].low, high=one.ratio[i].high, value=one.whole[i],
        )  # fmt: skip


def moving(stacks: Sequence[Stacked]) -> list[str]:
    """The roles that have a part anywhere, in the order in which they are stacked."""
    known = [role for role in (*ROLES, SCHEDULE) if any(role in s.parts for s in stacks)]
    names = dict.fromkeys([*known, *(name for s in stacks for name in s.parts)])
    return [n for n in names if any(value > 0 for s in stacks for value in s.parts.get(n, ()))]


def notes_of() -> list[str]:
    """Return notes that define a part, and explain why parts need not add up."""
    return [
        typeset("a part: ‖F(θ_0 + Δθ_{role}) − F(θ_0)‖, one role's change put in alone"),
        typeset("lengths do not add up as vectors do: whole is ‖ΔF‖ of all roles at once"),
    ]


@chart("attribution_vs_depth")
def attribution_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """Shares of the roles in the model update against depth, with the exponent of each part."""
    tables = tables_of(runs)
    used = list(tables)
    whole = [run for run in used if not has_diverged(run)] or used
    shared = set.intersection(*(set(tables[run]["step"].tolist()) for run in whole))
    if options.at_step is None and not shared:
        raise NothingMatchedError("the runs share no step in attribution.csv")
    step = int(max(shared)) if options.at_step is None else options.at_step
    rows = {run: table[table["step"] == step] for run, table in tables.items()}
    used = [run for run in used if len(rows[run])]
    if not used:
        raise NothingMatchedError(f"no run has a row for step {step} in attribution.csv")
    depths = sorted({int(run.get("model.depth", 0)) for run in used})
    if len(depths) < 2:
        raise NothingMatchedError(f"needs runs of two depths or more; all have N = {depths[0]}")
    series, depth_settings = split_series(used)
    shown, left = choose_series(series, MOST_PANELS)
    stacks, drawn = [], []
    for s in shown:
        one = stack(s.label, [(depth, joined(s.at(depth), rows)) for depth in s.depths])
        if len(one.x) > 1:
            stacks.append(one)
            drawn.append(s)
    if not stacks:
        raise NothingMatchedError(f"no setting has moved at two depths or more at step {step}")
    if still := [s.label for s in shown if s not in drawn]:
        left.append(f"moved at fewer than two depths: {'; '.join(still)}")
    roles = moving(stacks)
    table = Table()
    page = Page(2, len(stacks), height=1.35)
    draw_stacks(page, stacks, roles, table)
    left_out = False
    for i, (one, s) in enumerate(zip(stacks, drawn, strict=True)):
        for axes in (page.axes[i], page.axes[len(stacks) + i]):
            depth_axis(axes, depths)
        page.axes[i].set_xlabel("")
        fitted = in_order(one, s)
        left_out |= len(fitted) < len(one.x)
        page.legend_below(len(stacks) + i, *entries(one, roles, fitted, table))
    notes = [f"step {step}", *left, *notes_of(), *caption_of(used, depth_settings)]
    if left_out:
        notes.append("depths at which ‖ΔF‖ is saturated or a seed diverged are not in the fits")
    notes += diverged_note((f"{s.label}, N = {n}", s.at(n)) for s in drawn for n in s.depths)
    if len(used) < len(runs):
        notes.append(f"{len(runs) - len(used)} of {len(runs)} runs have no row for this step")
    title = "Where the model update comes from, against depth"
    figure = page.finish(title, title_of(used, series), notes, lines(table))
    return Chart(figure, table.frame(), title)


def joined(runs: Sequence[Run], rows: dict[Run, pd.DataFrame]) -> pd.DataFrame:
    """The rows of several runs below each other, each with its seed."""
    import pandas as pd

    seeded = [rows[run].assign(seed=int(run.get("seed", 0))) for run in runs]
    return pd.concat(seeded, ignore_index=True)


def in_order(one: Stacked, s: Series) -> list[int]:
    """Return the indices of points below saturation at which no seed diverged."""
    indices = []
    for i, (depth, value) in enumerate(zip(one.x, one.whole, strict=True)):
        if any(map(has_diverged, s.at(depth))):
            continue
        levels = [unrelated_distance(run, "model_update") for run in s.at(depth)]
        if value <= SATURATED * float(np.mean(levels)):
            indices.append(i)
    return indices


def entries(
    one: Stacked, roles: Sequence[str], fitted: Sequence[int], table: Table
) -> tuple[list[Handle], str]:
    """Return the legend of a panel, each role with the exponent of its part, and its title."""
    fits: list[Fit | None] = []

    def exponent(name: str, values: Sequence[float]) -> str:
        good = [i for i in fitted if values[i] > 0]
        by_seed = one.by_seed[name]
        fit = power_law_of_seeds([one.x[i] for i in good], [by_seed[i] for i in good])
        fits.append(fit)
        add_fit(table, one.name, name, fit)
        return f"{name.replace('_', ' ')}: {fit or 'no fit'}"

    handles: list[Handle] = []
    colours = dict(zip(roles, colours_of(roles), strict=True))
    for role in reversed([r for r in roles if any(v > 0 for v in one.parts.get(r, ()))]):
        label = exponent(role, one.parts[role])
        handles.append(Patch(color=colours[role], lw=0, label=label))
    handles.append(Line2D([], [], color="none", label=exponent("whole", one.whole)))
    return handles, exponent_title(fits)


def lines(table: Table) -> list[Handle]:
    """The legend of the lower panels."""
    handles: list[Handle] = [
        Line2D([], [], color="black", marker="o", ms=2.4, label="sum of the parts / whole"),
        Line2D([], [], **DASHED, label="parts add up to the whole"),
    ]
    return handles + band_handle(table)


@chart("attribution_vs_step")
def attribution_vs_step(runs: list[Run], *, options: Options) -> Chart:
    """Shares of the roles in the model update against the step, a panel a depth or a setting."""
    tables = tables_of(runs)
    used = list(tables)
    series, depth_settings = split_series(used)
    shown, notes = choose_panels(series, MOST_PANELS)
    stacks = []
    for name, members in shown:
        rows = joined(members, tables)
        steps = sorted({int(step) for step in rows["step"]})
        stacks.append(stack(name, [(step, rows[rows["step"] == step]) for step in steps]))
    if still := [one.name for one in stacks if len(one.x) < 2]:
        notes.append(f"moved at fewer than two steps: {'; '.join(still)}")
    notes += diverged_note((name, members) for name, members in shown if name not in still)
    stacks = [one for one in stacks if len(one.x) > 1]
    if not stacks:
        raise NothingMatchedError(
            "needs two steps or more in attribution.csv at which something has moved"
        )
    roles = moving(stacks)
    table = Table()
    page = Page(2, len(stacks), height=1.35)
    draw_stacks(page, stacks, roles, table)
    for i, one in enumerate(stacks):
        for axes in (page.axes[i], page.axes[len(stacks) + i]):
            step_axis(axes, one.x[0], one.x[-1])
        page.axes[i].set_xlabel("")
    handles: list[Handle] = [
        Patch(color=colour, lw=0, label=role.replace("_", " "))
        for role, colour in zip(roles, colours_of(roles), strict=True)
    ]
    title = "Where the model update comes from, against step"
    caption = notes + notes_of() + caption_of(used, depth_settings)
    figure = page.finish(title, title_of(used, series), caption, handles + lines(table))
    return Chart(figure, table.frame(), title)
