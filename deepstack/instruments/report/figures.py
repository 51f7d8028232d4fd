"""Describes the panels of a figure, so that the page can draw them again from their CSV."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepstack.plots.chart import Chart, PanelRows
from deepstack.runs.outcomes import OUTCOME_WORDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


def describe_figure(chart: Chart) -> dict[str, Any]:
    """Return scales, labels and line styles of a figure's panels, and the colours of its legend.

    kinds: of the table's rows that a panel shows; levels are in every panel of their name.
    The table of a plugin's chart, which describes no panels, has one for each name in it.
    """
    from matplotlib.colors import to_hex
    from matplotlib.patches import Patch

    axes = [one for one in chart.figure.axes if str(one.get_label()).startswith("panel")]
    axes = axes or list(chart.figure.axes)
    panels = []
    for name, index, kinds, styles in chart.panels or panels_of_table(chart, len(axes)):
        words = [OUTCOME_WORDS.get(kind, kind) for kind in kinds]
        described = describe_axes(axes, index)
        panels.append({"name": name, "kinds": words, "styles": styles, **described})
    legend = {
        plain(text.get_text()): to_hex(handle.get_facecolor())
        for one in chart.figure.legends
        for text, handle in zip(one.get_texts(), one.legend_handles, strict=True)
        if isinstance(handle, Patch)
    }
    return {"panels": panels, "legend": legend, "words": OUTCOME_WORDS}


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

    share: the first axes with the same limits of values.  scale: of colours, if there is one.
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


def plain(text: str) -> str:
    """Return a label without mathtext and line breaks: `‖F₀‖`."""
    text = re.sub(
        r"(?<!\\)\$_\{?([^}$]*)\}?\$",
        lambda m: m[1].translate(SUBSCRIPT) if m[1].isdigit() else f"_{m[1]}",
        text,
    )
    text = re.sub(r"(?<!\\)\$\\?(?:mathregular)?\{?([^$]*?)\}?\$", r"\1", text)
    return " ".join(text.replace(r"\$", "$").split())
