"""Any logged or per-layer quantity against a setting, the step, the layer or another column.

Both charts draw one table (`observation_table`): a row for each run and place on the axis, with the
panel and the line that show it.  `across` names the horizontal axis: `step`, `layer`, `flops`, a
dotted setting or a logged column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm, Normalize

from deepstack.base.text import counted, text_among
from deepstack.config.key import Key
from deepstack.plots.chart import Chart, Options, in_style
from deepstack.plots.curves import smoothed
from deepstack.plots.drawing import Drawing
from deepstack.plots.page import axis_label
from deepstack.plots.panel import CROWDED, markers
from deepstack.plots.style import MARKERS, axis_number, is_wide, number_axis, scheme_style, shades
from deepstack.plots.texts import drawn
from deepstack.records import ENDED, Run
from deepstack.runs.captions import means_note
from deepstack.runs.quantities import (
    LAYER,
    STEP,
    Layers,
    Quantity,
    axis_value,
    find_axis,
    find_quantity,
    observations,
)
from deepstack.runs.runs import Runs
from deepstack.runs.series import undetermined
from deepstack.runs.settings import DEPTH, SCHEME, order_of, require, scheme_label
from deepstack.runs.statistics import has_diverged, mask_note
from deepstack.runs.tidy import seed_statistics

MOST_NUMBERS = 64  # cells of a map up to which each shows its number
CROSS: Any = {"marker": "x", "color": "black", "ls": "none"}


@in_style
def metric(
    runs: Runs,
    x: str,
    y: str,
    by: str | None = None,
    *,
    layers: Layers | None = None,
    options: Options,
) -> Chart:
    """Draw a quantity against a setting, `step`, `layer` or another logged column.

    y: a column of steps.csv, evals.csv (`val_loss` for its loss) or timing.csv, or a per-layer
        diagnostic.
    by: the setting of the lines; by default the scheme, or the first that varies. Other settings
        make panels.  A point is the mean over seeds that did not diverge, with one standard
        deviation.  Against a setting the value is taken at `options.at_step` or the last step.
    layers: `mean` (of a diagnostic by default), `max`, `min`, `growth` (rate per layer), `last`, or
        the number of a layer.

    Raises ConfigError for an unknown name, NothingMatchedError without a finite value.
    """
    across = find_axis(x, runs)
    quantity = find_quantity(y, runs, "mean" if across == LAYER else layers)
    if across == LAYER:
        quantity = replace(quantity, words=quantity.words.removesuffix(", mean of layers"))
    others = settings_beside(runs, [across])
    default_key = SCHEME if SCHEME in others else next(iter(others), None)
    line_key = default_key if by is None else runs.key(by)
    table = observation_table(runs, quantity, across, line_key, options.at_step)
    is_number = all(isinstance(value, (int, float, np.number)) for value in table["x"])
    drawing = Drawing(runs, options if is_number else replace(options, x_scale=None))
    names = drawing.at_most(list(dict.fromkeys(table["panel"])))
    table = table[table["panel"].isin(names)]
    line_values = sorted_values(table["line"])
    if line_key is not None and (options.ordered or (options.schemes and line_key == SCHEME)):
        order = [setting_of(run, line_key) for run in runs]
        line_values.sort(key=order.index)
    lines = lines_of(line_key, line_values, runs)
    categories = None if is_number else sorted_values(table["x"])
    places = table.loc[np.isfinite(table["value"]), "x"]
    for panel, name in drawing.arrange(names, names):
        label_axis(panel.axes, "x", across, places, categories)
        in_panel = table[table["panel"] == name]
        for i, (line_value, (label, style)) in enumerate(lines.items()):
            rows = statistics(in_panel[in_panel["line"] == line_value], across)
            rows = smoothed(rows.assign(curve=0), options.smooth if across == STEP else 1)
            if categories is not None:
                rows["x"] = rows["x"].map(categories.index)
            is_crowded = len(lines) > CROWDED
            with_marker = is_crowded or bool(markers(len(rows)))
            panel.lines(label, rows, place=(i, len(lines)), **line_style(style, with_marker))
    drawing.value_axis(quantity_label(runs, quantity), drawing.panels)
    for label, style in lines.values() if len(lines) > 1 else ():
        drawing.entry(label, **style)
    drawing.notes += notes_on(runs, quantity, across, options)
    return drawing.finish(f"{quantity.title} against {across.words}")


@in_style
def value_map(
    runs: Runs, x: str, y: str, value: str, *, layers: Layers | None = None, options: Options
) -> Chart:
    """Draw a quantity over two settings, mean over the seeds that did not diverge.

    value, layers: as `y` and `layers` of `metric`.  A cross marks a cell of diverged runs only.
        Other settings that vary make panels.
    """
    quantity = find_quantity(value, runs, layers)
    x_key, y_key = runs.key(x), runs.key(y)
    table = observation_table(runs, quantity, x_key, y_key, options.at_step)
    if y_key == SCHEME:
        table["line"] = [scheme_label(run) for run in table["run"]]
    columns, levels = (sorted_values(table[name]) for name in ("x", "line"))
    seeds = table.groupby(["panel", "line", "x"], sort=False)["value"]
    cells = seeds.agg(value="mean", deviation="std", n="count").reset_index()
    means = cells["value"].dropna()
    log = bool((means > 0).all()) and (options.y_scale or is_wide(means)) in ("log", True)
    scale = (LogNorm if log else Normalize)(means.min(), means.max())
    cells["low"] = cells["value"] - cells["deviation"]
    cells["high"] = cells["value"] + cells["deviation"]
    cells["mark"] = np.where(cells["n"] > 0, "", "diverged")
    drawing = Drawing(runs, options)
    height = min(max(0.2 * len(levels), 0.8), 3.0)
    names = drawing.at_most(list(dict.fromkeys(cells["panel"])))
    for panel, name in drawing.arrange(names, names, height=height):
        in_panel = cells[cells["panel"] == name]
        grid = in_panel.pivot(index="line", columns="x", values="value")
        grid = grid.reindex(index=levels, columns=columns)
        edges = [np.arange(count + 1) - 0.5 for count in (len(columns), len(levels))]
        mesh = panel.axes.pcolormesh(*edges, np.ma.masked_invalid(grid), norm=scale, cmap="viridis")
        for cell in in_panel.itertuples():
            at = columns.index(cell.x), levels.index(cell.line)
            if math.isnan(cell.value):
                panel.axes.plot(*at, ms=4, **CROSS)
                drawing.entry("all seeds diverged", **CROSS)
            elif grid.size <= MOST_NUMBERS:
                colour = "white" if scale(cell.value) < 0.6 else "black"
                style: Any = {"color": colour, "fontsize": 5.5, "ha": "center", "va": "center"}
                panel.axes.text(*at, f"{cell.value:.3g}", **style)
        rows = in_panel.rename(columns={"line": "y"})
        panel.add(
            rows.assign(series=[text_among(line, levels) for line in in_panel["line"]]), kind="cell"
        )
        panel.axes.grid(False)
        panel.axes.set_facecolor("#DDDDDD")
        label_axis(panel.axes, "x", x_key, pd.Series(columns), columns)
        label_axis(panel.axes, "y", y_key, pd.Series(levels), levels)
    drawing.page.colour_bar(mesh, quantity_label(runs, quantity))
    drawing.notes += notes_on(runs, quantity, x_key, options)
    drawing.note("a cell is the mean over its seeds")
    return drawing.finish(f"{quantity.title} over {x_key.words} and {y_key.words}")


def line_style(style: Mapping[str, Any], with_marker: bool) -> dict[str, Any]:
    """Return the arguments of a line in a scheme's or a setting's style."""
    line = {"color": style["color"], "ls": style["linestyle"], "ms": 3}
    return line | {"marker": style["marker"]} if with_marker else line


def settings_beside(runs: Runs, known: Sequence[str]) -> list[Key]:
    """Return the settings that vary, depth among them, without the known ones."""
    varying = [DEPTH] * (len({run.get(DEPTH) for run in runs}) > 1) + runs.varying
    return [key for key in varying if key not in known]


def observation_table(
    runs: Runs, quantity: Quantity, across: Key, line_key: Key | None, at_step: int | None
) -> pd.DataFrame:
    """Return a table with the columns run, x, value, line and panel, one row an observation.

    line: the run's value of the setting `line_key`.  panel: the other settings that vary, in words.
    Settings that the axis and the lines determine, such as a learning rate chosen for each scheme,
    make no panels.  Against step or layer, diverged runs have no rows, unless all have diverged;
    else their value is NaN.  Where each run gives its last value, an unfinished run has no rows,
    unless all are unfinished.  Raises NothingMatchedError without a finite value.
    """
    known = [across, *([line_key] if line_key else [])]
    panel_keys = undetermined(settings_beside(runs, known), known, runs)
    in_order = sorted(runs, key=lambda run: [order_of(setting_of(run, key)) for key in panel_keys])
    table = observations(in_order, quantity, across, at_step)
    table["value"] = table["value"].astype(float).where(np.isfinite)
    ended = np.array([run.state in ENDED for run in table["run"]])
    if gives_last_values(across, runs, at_step) and ended.any():
        table = table[ended].copy()
    diverged = np.array([has_diverged(run) for run in table["run"]])
    if across not in (STEP, LAYER):
        table.loc[diverged, "value"] = math.nan
    elif not diverged.all():
        table = table[~diverged]
    require(
        table["value"].notna().any(),
        f"no finite value of {quantity.name} of a run that did not diverge",
    )
    panels = {
        run: ", ".join(
            f"N = {run.get(DEPTH)}" if key == DEPTH else runs.label(run, [key])
            for key in panel_keys
        )
        for run in runs
    }
    lines = ["" if line_key is None else setting_of(run, line_key) for run in table["run"]]
    return table.assign(line=lines, panel=table["run"].map(panels))


def gives_last_values(across: str, runs: Sequence[Run], at_step: int | None) -> bool:
    """Return whether the axis is a setting, or layers, and each run gives its last value."""
    return at_step is None and (across in runs[0].flat_config or across == LAYER)


def setting_of(run: Run, key: str) -> Any:
    """Return a scheme's name, or the number or text of another setting."""
    return run.get(SCHEME) if key == SCHEME else axis_value(run, key)


def statistics(table: pd.DataFrame, across: str) -> pd.DataFrame:
    """Return mean and deviation over seeds at each x; of a column at each step of both columns."""
    if "step" not in table or across in (STEP, LAYER):
        return seed_statistics(table, "x")
    rows = seed_statistics(table, "step")
    return rows.assign(x=rows["x"].map(table.groupby("step")["x"].mean()))


def sorted_values(values: pd.Series[Any]) -> list[Any]:
    return sorted(values.unique().tolist(), key=order_of)


def lines_of(
    key: Key | None, groups: Sequence[Any], runs: Sequence[Run]
) -> dict[Any, tuple[str, dict[str, Any]]]:
    """Return label and style of each line: schemes have their colours, other values are shades."""
    if key is None:
        label = ", ".join(dict.fromkeys(map(scheme_label, runs)))
        return {group: (label, scheme_style(str(runs[0].get(SCHEME)))) for group in groups}
    if key == SCHEME:
        labels = {run.get(SCHEME): scheme_label(run) for run in runs}
        return {group: (labels[group], scheme_style(str(group))) for group in groups}
    colours = shades(groups[::-1])
    lines = {}
    for i, group in enumerate(groups):
        label = f"N = {group}" if key == DEPTH else key.label(text_among(group, groups))
        style = {"color": colours[group], "linestyle": "-", "marker": MARKERS[i % len(MARKERS)]}
        lines[group] = (label, style)
    return lines


def label_axis(
    axes: Any, which: str, across: Key, values: pd.Series[Any], categories: Sequence[Any] | None
) -> None:
    """Label an axis with categories or numbers; numbers far apart have a logarithmic axis."""
    axes.set(**{f"{which}label": across.words})
    if categories is not None:
        words = [axis_number(v) if isinstance(v, (int, float)) else str(v) for v in categories]
        limits = (-0.5, len(categories) - 0.5)
        axes.set(**{f"{which}ticks": range(len(words)), f"{which}lim": limits})
        axes.set(**{f"{which}ticklabels": list(map(drawn, words))})
        axes.tick_params(axis=which, length=0)
        if which == "x" and max(map(len, words)) * len(words) > 24:
            axes.tick_params(axis="x", labelrotation=90)
        return
    x = values.to_numpy(float)
    log = bool((x > 0).all()) and is_wide(x) and across != LAYER
    number_axis(axes, which, x.tolist(), log)
    if log and across not in (STEP, LAYER) and len(set(x)) <= 6:
        axes.set_xticks(sorted(set(x)), [drawn(axis_number(v)) for v in sorted(set(x))])


def quantity_label(runs: Sequence[Run], quantity: Quantity) -> str:
    """Return the words of a quantity with its symbol and unit."""
    sections = ("layers",) if quantity.source == "layers" else ("columns",)
    return axis_label(runs, quantity.column, quantity.words, sections)


def notes_on(runs: Sequence[Run], quantity: Quantity, across: str, options: Options) -> list[str]:
    """Return notes on the step, the layers and the diverged runs."""
    notes = []
    if gives_last_values(across, runs, options.at_step):
        left = sum(run.state not in ENDED for run in runs)
        left_out = (
            f", without {counted('{} unfinished runs', left)}" if 0 < left < len(runs) else ""
        )
        notes.append(f"last value of each run{left_out}")
    elif across in runs[0].flat_config or across == LAYER:
        notes.append(f"step {options.at_step}")
    notes += means_note(runs)
    if (quantity.source, quantity.column) == ("evals", "loss") and (where := mask_note(runs)):
        notes.append(f"over all predicted positions; the loss{where} is val_loss_masked")
    if options.smooth > 1 and across == STEP:
        notes.append(f"mean over {options.smooth} rows")
    return notes
