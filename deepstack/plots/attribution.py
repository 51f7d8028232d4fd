"""Shares of the roles in the model update, against depth with exponents and against the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepstack.analysis.captions import diverged_note
from deepstack.analysis.fit import power_law_of_seeds
from deepstack.analysis.settings import choose_panels, choose_series, depth_of, depths_of
from deepstack.analysis.statistics import SATURATED, has_diverged, unrelated_distance
from deepstack.analysis.tidy import seed_statistics
from deepstack.config import ROLES
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.drawing import Drawing, Panel, level, lines, markers
from deepstack.plots.exponents import Exponents
from deepstack.plots.page import typeset
from deepstack.plots.style import depth_axis, shade, step_axis
from deepstack.records import Run

MOST_PANELS = 4
SCHEDULE = "schedule"
SUM = Line2D([], [], color="black", marker="o", ms=2.4, label="sum of the parts / whole")
NOTES = (
    typeset("a part: ‖F(θ_0 + Δθ_{role}) − F(θ_0)‖, one role's change put in alone"),
    typeset("lengths do not add up as vectors do: whole is ‖ΔF‖ of all roles at once"),
)

# Blue: matrices of the theorem; red: vectors beside the matrices; green: outside of layers.
COLOURS = {
    "q": "#DCE9F5", "k": "#BCD4EA", "v": "#94BEDD", "o": "#61A0CD", "w1": "#327FBA",
    "w2": "#0E559B", "w3": "#0A2F66", "cross_q": "#E4E1F0", "cross_k": "#C6C3E0",
    "cross_v": "#A19BC9", "cross_o": "#6F5BA6", "bias": "#FBD9B5", "norm_gain": "#F29A4A",
    "norm_bias": "#C8500A", "final_norm": "#7A2A04", "scheme": "#333333", "embedding": "#8CCB9B",
    "position": "#2E8B57", "head": "#C9C9C9", SCHEDULE: "#888888",
}  # fmt: skip


def runs_with_rows(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with a row in attribution.csv.  Raises NothingMatchedError for none."""
    used = [run for run in runs if len(run.attribution)]
    if not used:
        raise NothingMatchedError("no run has an attribution.csv (log.attribution_every is 0?)")
    return used


def shares_of(runs: Sequence[Run], step: int | None = None) -> pd.DataFrame:
    """Return a row for each run and step at which something moved: its attribution.

    With it are `x`, the step, or of one step the depth; the `seed`, and the `sum` of the parts.
    """
    tables = []
    for run in runs:
        rows = run.attribution
        rows = rows if step is None else rows[rows["step"] == step]
        x = rows["step"] if step is None else depth_of(run)
        tables.append(rows.assign(x=x, seed=int(run.get("seed", 0))))
    table = pd.concat(tables, ignore_index=True)
    parts = parts_of(table)
    table = table.fillna(dict.fromkeys(parts, 0.0))
    table["sum"] = table[parts].sum(axis=1, skipna=False)
    both = table[["sum", "whole"]].to_numpy(float)
    return table[(np.isfinite(both) & (both > 0)).all(axis=1)]


def parts_of(table: pd.DataFrame) -> list[str]:
    """The parts that make up the whole: roles, or the groups that a probed model was given."""
    known = [role for role in (*ROLES, SCHEDULE) if role in table]
    others = ("step", "seed", "whole", "unexplained", "x", "sum")
    return known or [str(name) for name in table if name not in others]


def words_of(role: str) -> str:
    return role.replace("_", " ")


def draw_shares(drawing: Drawing, tables: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """Draw shares in the upper row of panels, and the sum of the parts over the whole below.

    tables: of `shares_of`, by panel.  Returns the colours of the roles that moved.
    """
    count = len(tables)
    everything = pd.concat(tables.values(), ignore_index=True)
    roles = [role for role in parts_of(everything) if (everything[role] > 0).any()]
    colours = {role: COLOURS.get(role, shade(i, len(roles))) for i, role in enumerate(roles)}
    titles = [*tables, *[""] * count]
    panels = drawing.add_panels([*tables] * 2, titles=titles, columns=count, height=1.35)
    for above, below, table in zip(panels, panels[count:], tables.values(), strict=False):
        draw_stack(above, below, table.reindex(columns=table.columns.union(roles)), colours)
    drawing.value_axis("sum of parts / whole", panels[count:], "ratio", include=1.0)
    panels[0].axes.set_ylabel("share: part / sum of parts")
    for panel in panels[:count]:
        panel.axes.set_ylim(0, 1)
        panel.axes.grid(False)
        panel.axes.tick_params(labelbottom=False, labelleft=panel is panels[0])
    return colours


def draw_stack(above: Panel, below: Panel, table: pd.DataFrame, colours: dict[str, Any]) -> None:
    """Draw the means over seeds at each x; the value of a row is its part, or the whole."""
    groups = table.groupby("x")
    shares = table[list(colours)].div(table["sum"], axis=0).groupby(table["x"]).mean()
    n, parts = groups.size().to_numpy(), groups[list(colours)].mean()
    for role in shares.columns[shares.notna().all()]:
        columns = {"x": shares.index, "y": shares[role], "n": n, "value": parts[role]}
        above.add(pd.DataFrame(columns), series=role, kind="share")
    style: Any = {"edgecolor": "white", "linewidth": 0.25, "colors": list(colours.values())}
    above.axes.stackplot(shares.index, shares.fillna(0.0).T, **style)
    ratio = seed_statistics(table.assign(value=table["sum"] / table["whole"]), "x")
    ratio["value"] = groups["whole"].mean().to_numpy()
    level(below, 1.0, None, "parts add up to the whole")
    dots: Any = {"marker": markers(len(ratio)), "ms": 2.4}
    lines(below, "sum of parts / whole", ratio, kind="ratio", color="black", **dots)


@chart("attribution_vs_depth")
def attribution_vs_depth(runs: list[Run], *, options: Options) -> Chart:
    """Shares of the roles in the model update against depth, with the exponent of each part."""
    used = runs_with_rows(runs)
    finished = [run for run in used if not has_diverged(run)] or used
    shared = set.intersection(*(set(run.attribution["step"].tolist()) for run in finished))
    if options.at_step is None and not shared:
        raise NothingMatchedError("the runs share no step in attribution.csv")
    step = int(max(shared)) if options.at_step is None else options.at_step
    used = [run for run in used if (run.attribution["step"] == step).any()]
    if not used:
        raise NothingMatchedError(f"no run has a row for step {step} in attribution.csv")
    depths = depths_of(used)
    drawing = Drawing(used, options)
    shown, left = choose_series(drawing.series, min(drawing.limit(MOST_PANELS), 6))
    tables = {s: shares_of([run for depth in s.depths for run in s.at(depth)], step) for s in shown}
    still = [s.label for s in shown if tables[s]["x"].nunique() < 2]
    tables = {s: table for s, table in tables.items() if s.label not in still}
    if not tables:
        raise NothingMatchedError(f"no setting has moved at two depths or more at step {step}")
    colours = draw_shares(drawing, {s.label: table for s, table in tables.items()})
    left_out = False
    exponents = Exponents([s.label for s in tables])
    for i, (s, table) in enumerate(tables.items(), start=len(tables)):
        depth_axis(drawing.panels[i].axes, depths)
        depth_axis(drawing.panels[i - len(tables)].axes, depths)
        means: dict[Any, float] = table.groupby("x")["whole"].mean().to_dict()
        good = [depth for depth, mean in means.items() if is_in_order(s.at(depth), mean)]
        left_out |= len(good) < len(means)
        fitted = table[table["x"].isin(good)]
        moved = [role for role in colours if role in table and (table[role] > 0).any()]
        for role in [*moved, "whole"]:
            seeds = fitted.pivot(index="seed", columns="x", values=role)
            moving = seeds.loc[:, seeds.mean() > 0]
            by_seed: list[Any] = [moving[x].dropna().to_dict() for x in moving]
            fit = power_law_of_seeds(moving.columns.to_numpy(float).tolist(), by_seed)
            drawing.panels[i].add_fit(role, fit)
            look: Any = {"color": colours[role], "lw": 0} if role in colours else {"alpha": 0}
            exponents.add(words_of(role), s.label, fit, look)
    notes = [f"step {step}", *left]
    notes += [f"moved at fewer than two depths: {'; '.join(still)}"] if still else []
    if left_out:
        notes.append("depths at which ‖ΔF‖ is saturated or a seed diverged are not in the fits")
    notes += diverged_note((f"{s.label}, N = {n}", s.at(n)) for s in tables for n in s.depths)
    if len(used) < len(runs):
        notes.append(f"{len(runs) - len(used)} of {len(runs)} runs have no row for this step")
    title = "Where the model update comes from, against depth"
    notes += [*exponents.notes(), *NOTES]
    return drawing.finish(title, notes, [*exponents.handles(), SUM], exponents.title())


def is_in_order(seeds: Sequence[Run], mean: float) -> bool:
    """Return whether the mean of these seeds is below saturation, and none of them diverged."""
    levels = [unrelated_distance(run, "model_update") for run in seeds]
    return mean <= SATURATED * float(np.mean(levels)) and not any(map(has_diverged, seeds))


@chart("attribution_vs_step")
def attribution_vs_step(runs: list[Run], *, options: Options) -> Chart:
    """Shares of the roles in the model update against the step, a panel a depth or a setting."""
    used = runs_with_rows(runs)
    drawing = Drawing(used, options)
    shown, notes = choose_panels(drawing.series, min(drawing.limit(MOST_PANELS), 6))
    tables = {name: shares_of(members) for name, members in shown}
    if still := [name for name, table in tables.items() if table["x"].nunique() < 2]:
        notes.append(f"moved at fewer than two steps: {'; '.join(still)}")
    notes += diverged_note((name, members) for name, members in shown if name not in still)
    tables = {name: table for name, table in tables.items() if name not in still}
    if not tables:
        raise NothingMatchedError(
            "needs two steps or more in attribution.csv at which something has moved"
        )
    colours = draw_shares(drawing, tables)
    for panel, table in zip(drawing.panels, [*tables.values()] * 2, strict=True):
        step_axis(panel.axes, int(table["x"].min()), int(table["x"].max()))
    handles = [Patch(color=c, lw=0, label=words_of(role)) for role, c in colours.items()]
    title = "Where the model update comes from, against step"
    return drawing.finish(title, [*notes, *NOTES], [*handles, SUM])
