"""The model update of each parameter role against depth, with exponents."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepstack.analysis.calibration import TOGETHER, role_updates
from deepstack.analysis.fit import power_law_of_seeds
from deepstack.analysis.settings import LR, choose_series, depths_of, values_of, varying_settings
from deepstack.analysis.tidy import seed_statistics
from deepstack.config import ROLES
from deepstack.errors import NothingMatchedError
from deepstack.plots.chart import Chart, Options, chart
from deepstack.plots.drawing import MOST_BANDS, Drawing, points, published
from deepstack.plots.exponents import Exponents
from deepstack.plots.page import typeset
from deepstack.plots.style import COLOURS, DASHES, MARKERS, MORE_COLOURS, depth_axis
from deepstack.records import Run

MOST_PANELS = 6


@chart("update_by_role")
def update_by_role(runs: list[Run], *, options: Options) -> Chart:
    """Model update of each parameter role against depth, with exponents, a panel a setting."""
    used = [run for run in runs if len(run.attribution)]
    if not used:
        raise NothingMatchedError("no run has an attribution.csv (log.attribution_every is 0?)")
    runs, used = used, used if options.panels else without_half_rates(used)
    depths = depths_of(used)
    drawing = Drawing(used, options)
    tables = {s.label: role_updates(s.runs) for s in drawing.series}
    step = options.at_step
    if step is None:
        steps = set.intersection(*(set(table["step"]) for table in tables.values()))
        if not steps:
            raise NothingMatchedError("the runs share no step in attribution.csv")
        step = int(max(steps))
    tables = {label: table[table["step"] == step] for label, table in tables.items()}
    tables = {label: rows for label, rows in tables.items() if rows["depth"].nunique() > 1}
    able = [s for s in drawing.series if s.label in tables]
    if not able:
        raise NothingMatchedError(f"no setting has a row for step {step} at two depths or more")
    shown, notes = choose_series(able, drawing.limit(MOST_PANELS))
    moved = {role for s in shown for role in tables[s.label].query("value > 0")["role"]}
    roles = [role for role in (*ROLES, TOGETHER) if role in moved]
    roles += sorted(moved - set(roles))
    panels = drawing.add_panels([s.label if len(shown) > 1 else None for s in shown])
    exponents = Exponents([s.label for s in shown])
    for panel, s in zip(panels, shown, strict=True):
        table = tables[s.label]
        for role in roles:
            values = table[(table["role"] == role) & np.isfinite(table["value"])]
            by_depth = {
                float(n): dict(zip(at["seed"].astype(int), at["value"], strict=True))
                for n, at in values.groupby("depth")
                if (at["value"] > 0).all()
            }
            rows = seed_statistics(values, "depth")
            rows = rows[rows["y"] > 0].assign(mark="")
            style = role_style(role, roles)
            points(panel, role, rows, style, bars=len(roles) > MOST_BANDS)
            fit = power_law_of_seeds(list(by_depth), list(by_depth.values()))
            panel.add_fit(role, fit)
            exponents.add(role.replace("_", " "), s.label, fit, style)
        published(panel)
        depth_axis(panel.axes, depths)
    drawing.value_axis(typeset("‖ΔF_{role}‖"), panels)
    if len(used) < len(runs):
        notes.append("left out: runs at half the rate, which show how linear the updates are")
    notes = [f"step {step}", *notes, *exponents.notes()]
    notes.append("a role: the distance that F moves if its change alone is applied to θ$_0$")
    title = "Model update by parameter role against depth"
    return drawing.finish(title, notes, exponents.handles(), exponents.title())


def without_half_rates(runs: list[Run]) -> list[Run]:
    """Return runs without those of a calibration at half of its rate (see `deepstack calibrate`).

    A calibration has two rates, one of them half of the other, and never evaluates.
    """
    keys = [key for key in varying_settings(runs) if key != LR]
    rates: dict[tuple[Any, ...], set[float]] = {}
    for run in runs:
        rates.setdefault(values_of(run, keys), set()).add(float(run.get(LR, 0.0)))

    def is_half(run: Run) -> bool:
        there, rate = rates[values_of(run, keys)], float(run.get(LR, 0.0))
        return run.get("train.eval_every") == 0 and there == {rate, 2 * rate}

    return [run for run in runs if not is_half(run)]


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
