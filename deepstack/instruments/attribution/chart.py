"""The parts of the roles in the model update: shares, and each part against depth."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from deepstack.config import ROLES
from deepstack.plots import (
    COLOURS,
    DASHES,
    MARKERS,
    MORE_COLOURS,
    Chart,
    Drawing,
    Group,
    Options,
    Panel,
    chart,
    markers,
    shade,
    step_axis,
    typeset,
)
from deepstack.records import Run
from deepstack.runs import (
    TOGETHER,
    Fit,
    Runs,
    ceiling_of,
    depth_of,
    depths_of,
    diverged_note,
    last_row,
    points_of,
    power_law_of_seeds,
    require,
    role_updates,
    seed_statistics,
    shared_step,
)

MOST_PANELS = 4  # columns of shares
SCHEDULE, SUM = "schedule", "sum of parts / whole"
NOTES = (
    typeset("a part: ‖F(θ_0 + Δθ_{role}) − F(θ_0)‖, one role's change put in alone"),
    typeset("lengths do not add up as vectors do: whole is ‖ΔF‖ of all roles at once"),
)

Moving = tuple[Group, pd.DataFrame]  # the series and depths of a panel, and their `shares_of`

# Blue: matrices of the theorem; red: vectors beside the matrices; green: outside of layers.
ROLE_COLOURS = {
    "q": "#DCE9F5", "k": "#BCD4EA", "v": "#94BEDD", "o": "#61A0CD", "w1": "#327FBA",
    "w2": "#0E559B", "w3": "#0A2F66", "cross_q": "#E4E1F0", "cross_k": "#C6C3E0",
    "cross_v": "#A19BC9", "cross_o": "#6F5BA6", "bias": "#FBD9B5", "norm_gain": "#F29A4A",
    "norm_bias": "#C8500A", "final_norm": "#7A2A04", "scheme": "#333333", "embedding": "#8CCB9B",
    "position": "#2E8B57", "head": "#C9C9C9", SCHEDULE: "#888888",
}  # fmt: skip


def runs_with_rows(runs: Runs) -> Runs:
    """Return the runs with a row in attribution.csv.  Raises NothingMatchedError for none."""
    return runs.keep(
        lambda run: len(run.log("attribution")),
        "no run has an attribution.csv (log.attribution_every is 0?)",
    )


def step_of(runs: Runs, options: Options) -> tuple[int, Runs]:
    """Return the step of a chart against depth, and the runs with a row for it."""
    steps = {run: run.log("attribution")["step"].tolist() for run in runs_with_rows(runs)}
    step, used = shared_step(steps, options.at_step, " in attribution.csv")
    return step, Runs(used)


def shares_of(runs: Sequence[Run], step: int | None = None) -> pd.DataFrame:
    """Return a row for each run and step at which something moved: its attribution.

    With it are `x`, the step, or of one step the depth; the `seed`, and the `sum` of the parts.
    """
    tables = []
    for run in runs:
        rows = run.log("attribution")
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


def moving_groups(
    drawing: Drawing, groups: Sequence[Group], axis: str, step: int | None = None
) -> list[Moving]:
    """Return the groups that moved at two depths or steps, with `shares_of`; a note has the others.

    step: the step of a chart against depth.
    """
    tables = [(group, shares_of(group.runs, step)) for group in groups]
    still = [group.label for group, table in tables if table["x"].nunique() < 2]
    drawing.note(f"moved at fewer than two {axis}s: {'; '.join(still)}", when=still)
    require(
        len(still) < len(tables), f"in attribution.csv nothing has moved at two {axis}s or more"
    )
    return [(group, table) for group, table in tables if group.label not in still]


def draw_shares(drawing: Drawing, moving: Sequence[Moving]) -> dict[str, Any]:
    """Draw shares in the upper row of panels, and the sum of the parts over the whole below.

    Returns the colours of the roles that moved.
    """
    count = len(moving)
    everything = pd.concat([table for _, table in moving], ignore_index=True)
    roles = [role for role in parts_of(everything) if (everything[role] > 0).any()]
    colours = {role: ROLE_COLOURS.get(role, shade(i, len(roles))) for i, role in enumerate(roles)}
    names = [group.label for group, _ in moving]
    layout: Any = {"titles": [*names, *[""] * count], "columns": count, "height": 1.35}
    layout["published"] = False  # two panels have one name
    panels = [panel for panel, _ in drawing.arrange(names * 2, names * 2, **layout)]
    for above, below, (_, table) in zip(panels, panels[count:], moving, strict=False):
        draw_stack(above, below, table.reindex(columns=table.columns.union(roles)), colours)
    drawing.value_axis(SUM, panels[count:], "ratio", include=1.0)
    panels[0].axes.set_ylabel("part / sum of parts")
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
    below.level(1.0, None, "parts add up to the whole")  # both panels have one name
    dots: Any = {"marker": markers(len(ratio)), "ms": 2.4}
    below.lines(SUM, ratio, kind="ratio", color="black", **dots)


@chart("attribution_vs_depth")
def attribution_vs_depth(runs: Runs, *, options: Options) -> Chart:
    """Shares of the roles in the model update against depth, with the exponent of each part."""
    step, used = step_of(runs, options)
    depths = depths_of(used)
    drawing = Drawing(used, options)
    drawing.note(f"step {step}")
    moving = moving_groups(drawing, drawing.groups("series", MOST_PANELS), "depth", step)
    colours = draw_shares(drawing, moving)
    drawing.depth_axes(depths)
    left_out = False
    value = partial(whole_at, step=step)
    ceiling = partial(ceiling_of, column="model_update")
    for panel, (group, table) in zip(drawing.panels[len(moving) :], moving, strict=True):
        totals = points_of(group.series[0].by_depth, value, ceiling)
        good = totals[totals["mark"] == ""]["x"]
        left_out |= len(good) < len(totals)
        fitted = table[table["x"].isin(good)]
        for role in [*colours, "whole"]:
            if role not in table or not (table[role] > 0).any():
                continue
            fit = fit_of_seeds(fitted.assign(value=fitted[role]), "x")
            words = role.replace("_", " ")
            drawing.entry(words, patch=True, lw=0, color=colours.get(role, "none"))
            panel.add_fit(role, fit, group.label, words)
    lost = "depths at which ‖ΔF‖ is saturated or a seed diverged are not in the fits"
    drawing.note(lost, when=left_out)
    drawing.notes += diverged_note(
        (f"{group.label}, N = {n}", group.series[0].at(n))
        for group, _ in moving
        for n in group.depths
    )
    lacking = f"{len(runs) - len(used)} of {len(runs)} runs have no row for this step"
    drawing.note(lacking, when=len(used) < len(runs))
    return finish(drawing, "depth")


def finish(drawing: Drawing, axis: str) -> Chart:
    """Finish a chart of shares with the meaning of its lower panels."""
    drawing.entry("sum of the parts / whole", color="black", marker="o", ms=2.4)
    return drawing.finish(f"Where the model update comes from, against {axis}", *NOTES)


def fit_of_seeds(table: pd.DataFrame, by: str) -> Fit | None:
    """Return the power law of `value` in the column `by`, where the values of all seeds are > 0."""
    members: dict[Any, dict[int, float]] = {
        x: dict(zip(rows["seed"].astype(int), rows["value"], strict=True))
        for x, rows in table.groupby(by)
        if (rows["value"] > 0).all()
    }
    return power_law_of_seeds(list(members), list(members.values()))


def whole_at(run: Run, step: int) -> float | None:
    """Return the model update of a run at a step of attribution.csv."""
    return last_row(run.log("attribution")[run.log("attribution")["step"] == step], "whole")


@chart("attribution_vs_step")
def attribution_vs_step(runs: Runs, *, options: Options) -> Chart:
    """Shares of the roles in the model update against the step, a panel a depth or a setting."""
    used = runs_with_rows(runs)
    drawing = Drawing(used, options)
    moving = moving_groups(drawing, drawing.groups("stacks", MOST_PANELS), "step")
    drawing.notes += diverged_note((cell.label, cell.runs) for cell, _ in moving)
    for role, colour in draw_shares(drawing, moving).items():
        drawing.entry(role.replace("_", " "), patch=True, color=colour, lw=0)
    for panel, (_, table) in zip(drawing.panels, moving * 2, strict=True):
        step_axis(panel.axes, int(table["x"].min()), int(table["x"].max()))
    return finish(drawing, "step")


@chart("update_by_role")
def update_by_role(runs: Runs, *, options: Options) -> Chart:
    """Model update of each parameter role against depth, with exponents, a panel a setting."""
    step, used = step_of(runs, options)
    depths = depths_of(used)
    drawing = Drawing(used, options)
    tables = {s: role_updates(s.runs) for s in drawing.series}
    tables = {s: table[table["step"] == step] for s, table in tables.items()}
    able = [s for s, table in tables.items() if table["depth"].nunique() > 1]
    require(able, f"no setting has a row for step {step} at two depths or more")
    groups = drawing.groups("series", series=able)
    shown = [group.series[0] for group in groups]
    moved = {role for s in shown for role in tables[s].query("value > 0")["role"]}
    roles = [role for role in (*ROLES, TOGETHER) if role in moved]
    roles += sorted(moved - set(roles))
    for panel, s in drawing.arrange(shown, [group.name for group in groups]):
        table = tables[s]
        for role in roles:
            values = table[(table["role"] == role) & np.isfinite(table["value"])]
            rows = seed_statistics(values, "depth")
            rows = drawing.above_zero(rows).assign(mark="")
            style = role_style(role, roles)
            panel.points(role, rows, style)
            words = role.replace("_", " ")
            drawing.entry(words, **style)
            fit = fit_of_seeds(values, "depth")
            panel.add_fit(role, fit, s.label, words)
    drawing.depth_axes(depths)
    drawing.value_axis(typeset("‖ΔF_{role}‖"), drawing.panels, log=True)
    drawing.note(f"step {step}")
    meaning = typeset("a role: the distance that F moves if its change alone is applied to θ_0")
    return drawing.finish("Model update by parameter role against depth", meaning)


def role_style(role: str, roles: list[str]) -> dict[str, Any]:
    """Return colour, line and marker of a role, which depend on its name, or for others' groups."""
    if role == TOGETHER:
        return {"color": "#000000", "linestyle": DASHES[1], "marker": "o"}
    colours = [colour for colour in COLOURS + MORE_COLOURS if colour != "#000000"]
    index = ROLES.index(role) if role in ROLES else roles.index(role)
    return {
        "color": colours[index % len(colours)],
        "linestyle": "-" if index < len(colours) else DASHES[2],
        "marker": MARKERS[(index + index // len(colours)) % len(MARKERS)],
    }
