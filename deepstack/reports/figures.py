"""Describes the panels of a figure, so that the page can draw them again from their CSV."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deepstack.plots.chart import Chart

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def describe_figure(chart: Chart) -> dict[str, Any]:
    """Return scales, labels and line styles of a figure's panels, and the colours of its legend.

    A panel of the table belongs to the axes that draw most of its points; without any, to the axes
    at its place.
    """
    from matplotlib.colors import to_hex

    axes = [one for one in chart.figure.axes if str(one.get_label()).startswith("panel")]
    axes = axes or list(chart.figure.axes)
    drawn = [points_of_lines(one) for one in axes]
    table = chart.data
    if "panel" in table:
        groups = [(str(name), rows) for name, rows in table.groupby("panel", sort=False)]
    else:
        groups = [("", table)]
    panels = []
    for place, (name, rows) in enumerate(groups):
        keys = set(keys_of(rows))
        hits = [len(keys & set(points)) for points in drawn]
        index = hits.index(max(hits)) if any(hits) else min(place, len(axes) - 1)
        styles = {}
        if "series" in rows:
            for series, part in rows.groupby("series", sort=False):
                if style := next((drawn[index].get(key) for key in keys_of(part)), None):
                    styles[str(series)] = style
        panels.append({"name": name, "styles": styles, **describe_axes(axes, index)})
    patches = [
        (text.get_text(), patch.get_facecolor())
        for legend in chart.figure.legends
        for text, patch in zip(legend.get_texts(), legend.get_patches(), strict=False)
    ]
    legend = {plain(text): to_hex(colour) for text, colour in patches}
    return {"panels": panels, "legend": legend}


def describe_axes(axes: Sequence[Axes], index: int) -> dict[str, Any]:
    """Return title, labels and scales; a label that only a neighbour shows is that neighbour's.

    share: the first axes with the same limits of values.  scale: that of colours, if there is one.
    """
    own = axes[index]
    x_labels = [one.get_xlabel() for one in (own, *axes[index:], *axes[:index])]
    y_labels = [one.get_ylabel() for one in (own, *reversed(axes[:index]), *axes[index:])]
    norms = [mesh.norm for mesh in own.collections if mesh.get_array() is not None]
    scale: dict[str, Any] = {"low": norms[0].vmin, "high": norms[0].vmax} if norms else {}
    if norms:
        scale["log"] = "Log" in type(norms[0]).__name__
        bar = [one for one in own.figure.axes if one.get_label() == "colour bar"]
        scale["label"] = plain(bar[0].get_ylabel()) if bar else ""
    return {
        "title": plain(own.get_title(loc="left")),
        "x": plain(next(filter(None, x_labels), "")),
        "y": plain(next(filter(None, y_labels), "")),
        "share": [one.get_ylim() for one in axes].index(own.get_ylim()),
        "log_x": own.get_xscale() == "log",
        "log_y": own.get_yscale() == "log",
        "scale": scale,
    }


def points_of_lines(axes: Axes) -> dict[tuple[str, str], tuple[str, bool]]:
    """Return colour and whether it is dashed of the line through each point of these axes."""
    from matplotlib.colors import to_hex

    styles: dict[tuple[str, str], tuple[str, bool]] = {}
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
