"""Describes the panels of a figure, so that the page can draw them again from their CSV."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepstack.analysis.outcomes import OUTCOME_WORDS
from deepstack.plots.chart import Chart

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Style = tuple[str, bool]  # colour, and whether the line is dashed
SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def describe_figure(chart: Chart) -> dict[str, Any]:
    """Return scales, labels and line styles of a figure's panels, and the colours of its legend.

    kinds: those of the table's rows that a panel shows; levels are in every panel of their name.
    """
    from matplotlib.colors import to_hex
    from matplotlib.patches import Patch

    axes = [one for one in chart.figure.axes if str(one.get_label()).startswith("panel")]
    axes = axes or list(chart.figure.axes)
    drawn = [points_of_lines(one) for one in axes]
    panels = []
    for name, rows, index in split_panels(chart.data, drawn):
        styles = {}
        if "series" in rows:
            for series, part in rows.groupby("series", sort=False):
                if style := next((drawn[index].get(key) for key in keys_of(part)), None):
                    styles[str(series)] = style
        kinds = [word(kind) for kind in rows["kind"].unique()] if "kind" in rows else []
        described = describe_axes(axes, index)
        panels.append({"name": name, "kinds": kinds, "styles": styles, **described})
    legend = {
        plain(text.get_text()): to_hex(handle.get_facecolor())
        for one in chart.figure.legends
        for text, handle in zip(one.get_texts(), one.legend_handles, strict=True)
        if isinstance(handle, Patch)
    }
    return {"panels": panels, "legend": legend, "words": OUTCOME_WORDS}


def word(kind: object) -> str:
    """Return the word that readers see for the kind of a row, such as an outcome."""
    return OUTCOME_WORDS.get(str(kind), str(kind))


def split_panels(
    table: pd.DataFrame, drawn: Sequence[Mapping[tuple[str, str], Style]]
) -> list[tuple[str, pd.DataFrame, int]]:
    """Return name, rows and number of the axes of each panel of a table.

    A kind of rows belongs to the axes whose lines pass through most of its points.  A kind without
    lines, such as an area, is beside the lines of its panel if these have other axes: it gets the
    first axes that no line has.  A panel without any lines gets the axes at its place.
    """
    groups = table.groupby("panel", sort=False) if "panel" in table else [("", table)]
    panels: list[tuple[str, pd.DataFrame, int | None]] = []
    for name, rows in groups:
        kinds = rows.groupby("kind", sort=False) if "kind" in rows else [("", rows)]
        places: dict[int | None, list[Any]] = {}
        for kind, part in kinds:
            keys = set(keys_of(part))
            hits = [len(keys & set(points)) for points in drawn]
            if kind not in ("level", "fit", "reference"):
                places.setdefault(hits.index(max(hits)) if any(hits) else None, []).append(kind)
        for index, members in places.items():
            shown = rows[rows["kind"].isin(members)] if "kind" in rows else rows
            panels.append((str(name), shown, index))
    assigned = {index for _, _, index in panels}
    free = [i for i in range(len(drawn)) if i not in assigned] or [0]
    placed = []
    for name, rows, index in panels:
        if index is None:
            index = free.pop(0) if len(free) > 1 else free[0]
        placed.append((name, rows, index))
    return placed


def describe_axes(axes: Sequence[Axes], index: int) -> dict[str, Any]:
    """Return title, labels and scales; a label that only a neighbour shows is that neighbour's.

    share: the first axes with the same limits of values.  scale: that of colours, if there is one.
    """
    one_axes = axes[index]
    x_labels = [one.get_xlabel() for one in (one_axes, *axes[index:], *axes[:index])]
    y_labels = [one.get_ylabel() for one in (one_axes, *reversed(axes[:index]), *axes[index:])]
    norms = [mesh.norm for mesh in one_axes.collections if mesh.get_array() is not None]
    scale: dict[str, Any] = {"low": norms[0].vmin, "high": norms[0].vmax} if norms else {}
    if norms:
        scale["log"] = "Log" in type(norms[0]).__name__
        bar = [one for one in one_axes.figure.axes if one.get_label() == "colour bar"]
        scale["label"] = plain(bar[0].get_ylabel()) if bar else ""
    return {
        "title": plain(one_axes.get_title(loc="left")),
        "x": plain(next(filter(None, x_labels), "")),
        "y": plain(next(filter(None, y_labels), "")),
        "share": [one.get_ylim() for one in axes].index(one_axes.get_ylim()),
        "log_x": one_axes.get_xscale() == "log",
        "log_y": one_axes.get_yscale() == "log",
        "scale": scale,
    }


def points_of_lines(axes: Axes) -> dict[tuple[str, str], Style]:
    """Return colour and whether it is dashed of the line through each point of these axes."""
    from matplotlib.colors import to_hex

    styles: dict[tuple[str, str], Style] = {}
    for line in axes.lines:
        style = to_hex(line.get_color()), line.get_linestyle() in ("--", ":", "-.")
        for x, y in np.asarray(line.get_xydata(), float):
            styles.setdefault((f"{x:.7g}", f"{y:.7g}"), style)
    return styles


def keys_of(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the points of a table in the form of `points_of_lines`."""
    if "x" not in rows or "y" not in rows:
        return []
    both = rows[["x", "y"]].dropna().to_numpy(float)
    return [(f"{x:.7g}", f"{y:.7g}") for x, y in both]


def plain(text: str) -> str:
    """Return a label without mathtext and line breaks: `‖F₀‖`."""
    text = re.sub(
        r"\$_\{?([^}$]*)\}?\$",
        lambda m: m[1].translate(SUBSCRIPT) if m[1].isdigit() else f"_{m[1]}",
        text,
    )
    return " ".join(re.sub(r"\$\\?(?:mathregular)?\{?([^$]*?)\}?\$", r"\1", text).split())
