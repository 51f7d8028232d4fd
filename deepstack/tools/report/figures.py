"""Describes the panels of a figure, so that the page can draw them again from their CSV."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from deepstack.base import cell_text, short_text
from deepstack.plots import COLOURS, CSV_COLUMNS, GREY, Chart, LineStyle, PanelRows
from deepstack.runs import OUTCOME_WORDS

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def describe_figure(chart: Chart) -> dict[str, Any]:
    """Return the shape, panels and legend of a figure.

    shape: `lines`, or `map` (boxes by outcome) or `heat` (boxes by value).
    panels: name, rows, scales, labels and styles of each; a panel shows the rows of its name whose
        kind is in `kinds`, and levels.  The table of a plugin's chart, which describes no panels,
        has one for each name in it.
    series: style of each series of lines, in the order of the table.
    keys: other entries of the legend: text, style (a colour alone for boxes) and kind.
    colours: of the boxes of a map, by kind.
    """
    from matplotlib.colors import to_hex
    from matplotlib.patches import Patch

    axes = [one for one in chart.figure.axes if str(one.get_label()).startswith("panel")]
    axes = axes or list(chart.figure.axes)
    legend = {
        plain(text.get_text()): to_hex(handle.get_facecolor())
        for one in chart.figure.legends
        for text, handle in zip(one.get_texts(), one.legend_handles, strict=True)
        if isinstance(handle, Patch)
    }
    rows = table_of(chart)
    shape, shown = shape_of(rows, legend), list(chart.panels) or panels_of_table(chart, len(axes))
    style = partial(style_of, legend, [panel.styles for panel in shown], series_of(rows))
    panels = []
    for panel in shown:
        of_panel = rows[rows["panel"] == panel.name]
        pairs = of_panel[["kind", "series"]].drop_duplicates().itertuples(index=False)
        styles: dict[str, dict[str, LineStyle]] = {
            kind: dict(of) for kind, of in panel.styles.items()
        }
        for kind, series in pairs if shape == "lines" else ():
            styles.setdefault(kind, {}).setdefault(series, style(kind, series))
        described = describe_axes(axes, panel.axes)
        described["scale"] = {**scale_of(of_panel), **described["scale"]}
        words = [OUTCOME_WORDS.get(kind, kind) for kind in panel.kinds]
        styles = {kind: named_as_cells(of) for kind, of in styles.items()}
        name = cell_text(panel.name)
        panels.append({"name": name, "kinds": words, "styles": styles, **described})
    add_headings(panels)
    kinds = [kind for kind in rows["kind"].unique() if kind != "frontier"]
    boxes = {OUTCOME_WORDS.get(kind, kind): box_colour(legend, kinds, kind) for kind in kinds}
    keys: list[tuple[str, Sequence[Any], str]] = []
    if shape == "lines":
        levels = rows.loc[(rows["kind"] == "level") & rows["x"].isna(), "series"].unique()
        keys = [(word, look, "kind") for word, look in kind_keys(shown)]
        keys += [(cell_text(one), style("level", one), "level") for one in levels]
    elif shape == "map":
        keys = [(kind, (colour,), "box") for kind, colour in boxes.items()]
    else:
        keys = scale_keys(panels)
    return {
        "shape": shape,
        "panels": panels,
        "series": list(named_as_cells({one: style("", one) for one in series_of(rows)}).items())
        if shape == "lines"
        else [],
        "keys": keys,
        "colours": boxes,
        "words": OUTCOME_WORDS,
    }


def named_as_cells(looks: Mapping[str, LineStyle]) -> dict[str, LineStyle]:
    """Return looks by the names of series in the chart's CSV, from which the page draws."""
    return {cell_text(series): look for series, look in looks.items()}


def table_of(chart: Chart) -> pd.DataFrame:
    """Return the table of a chart with all columns that a panel may show."""
    rows = chart.data.reindex(columns=[*CSV_COLUMNS]).copy()
    for name in ("panel", "series", "kind"):
        rows[name] = rows[name].astype(object).where(rows[name].notna(), "").astype(str)
    return rows


def shape_of(rows: pd.DataFrame, legend: Mapping[str, str]) -> str:
    """Return `heat` for a table of cells, `map` for boxes of the legend's kinds, else `lines`."""
    kinds = set(rows["kind"])
    if "cell" in kinds:
        return "heat"
    words = {OUTCOME_WORDS.get(kind, kind) for kind in kinds - {"frontier"}}
    return "map" if words <= set(legend) else "lines"


def series_of(rows: pd.DataFrame) -> list[str]:
    """Return the series that have points, in their order."""
    return list(rows.loc[rows["x"].notna() & (rows["kind"] != "fit"), "series"].unique())


def style_of(
    legend: Mapping[str, str],
    styles: Sequence[Mapping[str, Mapping[str, LineStyle]]],
    names: Sequence[str],
    kind: str,
    series: str,
) -> LineStyle:
    """Return colour, dash, hollow points and bars of a series, from any panel that has it.

    styles: of each panel by kind and series.  legend, names: where no panel has it, the colour is
    its colour in the legend, or depends on its place among the names, or is grey.
    """
    same = [of[kind][series] for of in styles if series in of.get(kind, {})]
    others = [of_kind[series] for of in styles for of_kind in of.values() if series in of_kind]
    if same or others:
        return (same or others)[0]
    if series not in names:  # a level
        return LineStyle(GREY, "")
    place = names.index(series)
    colour = legend.get(series.replace("_", " "), COLOURS[place % (len(COLOURS) - 1)])
    return LineStyle(colour, "")


def kind_keys(panels: Sequence[PanelRows]) -> list[tuple[str, LineStyle]]:
    """Return the meaning of points without a line beside lines: `validation` beside `training`."""
    looks = {
        kind: next(iter(of.values()))
        for panel in panels
        for kind, of in panel.styles.items()
        if kind not in ("level", "reference") and of
    }
    if len({look.dash is None for look in looks.values()}) < 2:
        return []
    dashes = {kind: None if look.dash is None else "" for kind, look in looks.items()}
    return [
        (OUTCOME_WORDS.get(kind, kind), LineStyle(GREY, dashes[kind], look.hollow))
        for kind, look in looks.items()
    ]


def box_colour(legend: Mapping[str, str], kinds: Sequence[str], kind: str) -> str:
    """Return the colour of the boxes of a kind."""
    word = OUTCOME_WORDS.get(kind, kind)
    return legend.get(word, COLOURS[kinds.index(kind) % (len(COLOURS) - 1)])


def scale_keys(panels: Sequence[dict[str, Any]]) -> list[tuple[str, Sequence[Any], str]]:
    """Return the entries of a legend for the scales of colours of some panels."""
    keys: list[tuple[str, Sequence[Any], str]] = []
    for scale in (panel["scale"] for panel in panels):
        log = ", logarithmic" if scale.get("log") else ""
        limits = f"{short_text(scale['low'])} to {short_text(scale['high'])}{log}"
        key = (f"{scale.get('label') or 'value'}: {limits}", (scale["colours"],), "box")
        keys += [key] if key not in keys else []
    return keys


def scale_of(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the limits and greys of boxes, for a map that has no scale of colours."""
    values = rows["value"].dropna()
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    return {"low": low, "high": high, "colours": ["#ffffff", "#000000"]}


def add_headings(panels: Sequence[dict[str, Any]]) -> None:
    """Give each panel the line above it: its title, with its name where titles are equal."""
    titles = [panel["title"] or (panel["name"] if len(panels) > 1 else "") for panel in panels]
    for panel, title in zip(panels, titles, strict=True):
        name = panel["name"]
        longer = name if name.startswith(title) else f"{title}: {name}"
        panel["heading"] = longer if title and titles.count(title) > 1 else title


def panels_of_table(chart: Chart, count: int) -> list[PanelRows]:
    """Return the panels of a table: names in their order belong to the figure's `count` axes."""
    table = chart.data
    groups = table.groupby("panel", sort=False) if "panel" in table else [("", table)]
    panels = []
    for i, (name, rows) in enumerate(groups):
        kinds = list(rows["kind"].unique()) if "kind" in rows else []
        panels.append(PanelRows(str(name), min(i, count - 1), kinds, {}))
    return panels


def describe_axes(axes: Sequence[Axes], index: int) -> dict[str, Any]:
    """Return title, labels and scales; a label that only a neighbour shows is that neighbour's.

    share: the first axes with the same limits of values.
    scale: limits, label and colours from low to high, if there is a scale of colours.
    """
    from matplotlib.colors import to_hex

    one_axes = axes[index]
    x_labels = [one.get_xlabel() for one in (one_axes, *axes[index:], *axes[:index])]
    y_labels = [one.get_ylabel() for one in (one_axes, *reversed(axes[:index]), *axes[index:])]
    meshes = [mesh for mesh in one_axes.collections if mesh.get_array() is not None]
    scale: dict[str, Any] = {}
    for mesh in meshes[:1]:
        bar = [one for one in one_axes.figure.axes if one.get_label() == "colour bar"]
        scale = {
            "low": mesh.norm.vmin,
            "high": mesh.norm.vmax,
            "log": "Log" in type(mesh.norm).__name__,
            "label": plain(bar[0].get_ylabel()) if bar else "",
            "colours": [to_hex(colour) for colour in mesh.cmap(range(0, 256, 5))],
        }
    return {
        "title": plain(one_axes.get_title(loc="left")),
        "x": plain(next(filter(None, x_labels), "")),
        "y": plain(next(filter(None, y_labels), "")),
        "share": [one.get_ylim() for one in axes].index(one_axes.get_ylim()),
        "log_x": one_axes.get_xscale() == "log",
        "log_y": one_axes.get_yscale() == "log",
        "scale": scale,
    }


def plain(text: str) -> str:
    """Return a label without mathtext and line breaks: `‖F₀‖`."""
    text = re.sub(
        r"(?<!\\)\$_\{?([^}$]*)\}?\$",
        lambda m: m[1].translate(SUBSCRIPT) if m[1].isdigit() else f"_{m[1]}",
        text,
    )
    text = re.sub(r"(?<!\\)\$\\?(?:mathregular)?\{?([^$]*?)\}?\$", r"\1", text)
    return " ".join(text.replace(r"\$", "$").split())
