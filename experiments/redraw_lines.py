"""Draws a chart of lines and points again from its CSV, in the style of `deepstack plot`."""

import math
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from deepstack.plots import (
    COLOURS,
    DASHES,
    GREY,
    MOST_LINES,
    Chart,
    Legend,
    Page,
    Panel,
    Table,
    axis_number,
    depth_axis,
    is_wide,
    number_axis,
    place_side_by_side,
    scheme_style,
    setting_style,
    shades,
    step_axis,
    tried_axis,
    typeset,
    untypeset,
)
from deepstack.runs import Fit, Interval
from deepstack.schemes import SCHEMES
from deepstack.tools.coordinates import LINE_STYLES
from deepstack.tools.transfer import PUBLISHED_LAWS, typeset_law

UPDATE = f"model update {typeset('‖ΔF‖')}"
# Chart -> title, label of the values
TEXTS = {
    "update_vs_depth": ("Model update against depth", UPDATE),
    "update_vs_step": ("Model update against step", UPDATE),
    "loss_vs_step": ("Loss against step", "loss (nats)"),
    "last_layer_vs_step": ("LN input, feed-forward of the last layer", "LN input ‖z‖"),
    "final_loss_vs_depth": ("Final validation loss against depth", "validation loss (nats)"),
    "loss_vs_lr": ("Final validation loss against learning rate", "validation loss (nats)"),
    "best_lr_vs_depth": ("Best learning rate against depth", "best learning rate"),
    "solved_vs_depth": ("Largest k solved against depth", "largest k solved"),
    "coordinate_check": ("Coordinate check", ""),
    "val_loss_vs_step": ("Validation loss against step", "validation loss (nats)"),
    "loss_vs_unique_layers": ("Validation loss against unique layers", "validation loss (nats)"),
    "iso_flop": ("Loss at equal FLOPs against depth", "validation loss (nats)"),
    "loss_vs_compute": ("Loss against training FLOPs", "validation loss (nats)"),
    "grad_norm_by_layer": ("Gradient norm by layer", f"gradient norm {typeset('‖∇L‖')}"),
    "effective_depth_vs_depth": ("Effective depth against depth", ""),
    "effective_depth_on_group": ("Effective depth against depth", ""),
    "lens_by_layer": ("Prediction read after each layer", ""),
    "bound_vs_depth": ("Theorem 4.2 and the measured model update against depth", ""),
    "gradient_ratios": ("Gradient ratios by layer", ""),
}
# Charts whose colours tell apart the last parts of the series' names, such as depths, or the first.
BY_LAST = (
    "loss_vs_lr",
    "loss_vs_step",
    "val_loss_vs_step",
    "loss_vs_unique_layers",
    "iso_flop",
    "loss_vs_compute",
    "grad_norm_by_layer",
)
BY_FIRST = ("gradient_ratios",)
# Chart -> label of x, which is then not depth, step or rate
X = {
    "loss_vs_unique_layers": "unique layers",
    "loss_vs_compute": "training FLOPs",
    "lens_by_layer": "layer l / N",
    "grad_norm_by_layer": "layer l",
    "gradient_ratios": "layer l",
}
LOG_X = ("loss_vs_compute",)
LOG_Y = ("update_vs_depth", "best_lr_vs_depth", "coordinate_check", "grad_norm_by_layer")
LINEAR_Y = ("share of the depth", "right-hand side / measured")
EFFECTIVE = {"layers": "effective depth (layers)", "share of the depth": "effective depth / N"}
# Chart -> end of a panel's name -> label of its values; the first end that fits counts
VALUES = {
    "coordinate_check": {
        "update": typeset("‖x_{l,t} − x_{l,0}‖/√d"),
        "size": typeset("‖x_{l,t}‖/√d"),
    },
    "effective_depth_vs_depth": EFFECTIVE,
    "effective_depth_on_group": EFFECTIVE,
    "lens_by_layer": {"KL to the final output": "KL (nats)", "loss": "loss (nats)"},
    "bound_vs_depth": {
        "right-hand side / measured": f"right-hand side / {typeset('‖ΔF‖')}",
        "right-hand side": "right-hand side",
        "measured": UPDATE,
    },
    "gradient_ratios": {
        "β_LN·β_RC": "both",
        "β_LN": "through the norm",
        "β_RC": "over the sum",
    },
}


class Redrawing:
    """A figure while it is drawn from the rows of its CSV.

    name: of the chart.
    rows: of the CSV, with every column that panels read.
    entry: texts of figures.yaml.
    """

    def __init__(self, name: str, rows: pd.DataFrame, entry: dict[str, str]) -> None:
        self.name, self.entry = name, entry
        self.rows = rows.reindex(columns=rows.columns.union(["panel", "mark", "low", "high", "n"]))
        for column in ("panel", "mark"):
            self.rows[column] = self.rows[column].astype(object).fillna("")
        self.table, self.legend = Table(), Legend()
        drawn = self.rows[~self.rows["kind"].isin(["level", "reference", "fit", "law"])]
        self.values = drawn
        self.series = list(dict.fromkeys(drawn["series"]))
        self.styles = self._styles()

    def _styles(self) -> dict[str, dict[str, Any]]:
        """Return the style of each series: its scheme's, or shades of depth, dark for deep."""
        if self.name == "coordinate_check":
            places = {series: series.split(", ") for series in self.series}
            depths = sorted({int(depth.split()[1]) for depth, _ in places.values()}, reverse=True)
            colours = shades(depths)
            return {
                series: {"color": colours[int(depth.split()[1])]} | LINE_STYLES[layer]
                for series, (depth, layer) in places.items()
            }
        look: Any = {"linestyle": "-", "marker": "o"}
        if self.name in BY_LAST:
            parts = sorted(dict.fromkeys(map(self.label, self.series)), key=number_in)
            shade = shades(parts[::-1])
            return {one: look | {"color": shade[self.label(one)]} for one in self.series}
        if self.name in BY_FIRST:
            parts = list(dict.fromkeys(series.partition(", ")[0] for series in self.series))
            ends = list(dict.fromkeys(series.partition(", ")[2] for series in self.series))
            return {
                series: look
                | {
                    "color": COLOURS[parts.index(first)],
                    "linestyle": DASHES[ends.index(end)],
                }
                for series in self.series
                for first, _, end in [series.partition(", ")]
            }
        styles = {}
        for members in self.by_scheme().values():
            for i, series in enumerate(members):
                scheme = self.scheme_of(series)
                styles[series] = setting_style(scheme_style(scheme), i, len(members))
        return styles

    def label(self, series: str) -> str:
        """Return the entry of a series in the legend."""
        return series.rpartition(", ")[2] if self.name in BY_LAST else series

    def scheme_of(self, series: str) -> str:
        """Return the scheme with the longest label that begins a series, or the entry's scheme."""
        labels = {cls.label: name for name, cls in SCHEMES.items()}
        fitting = [label for label in labels if series == label or series.startswith(f"{label},")]
        return labels[max(fitting, key=len)] if fitting else self.entry["scheme"]

    def by_scheme(self) -> dict[str, list[str]]:
        """Return the series of each scheme."""
        members: dict[str, list[str]] = {}
        for series in self.series:
            members.setdefault(self.scheme_of(series), []).append(series)
        return members

    def contents(self) -> list[tuple[str, str, list[str]]]:
        """Return panel of the CSV, title and series of each panel that is drawn."""
        panels = list(dict.fromkeys(self.values["panel"]))
        of_panel = {
            panel: [one for one in self.series if one in set(rows["series"])]
            for panel, rows in self.values.groupby("panel", sort=False)
        }
        if any(shown != self.series for shown in of_panel.values()):  # a panel a scheme
            return [(str(panel), str(panel), shown) for panel, shown in of_panel.items()]
        by_part = self.name in (*BY_LAST, *BY_FIRST, "coordinate_check")
        members = {} if by_part else self.by_scheme()
        if len(self.series) <= MOST_LINES or len(members) in (0, 1, len(self.series)):
            return [(panel, panel, self.series) for panel in panels]
        return [
            (panel, ": ".join(filter(None, [SCHEMES[scheme].label, panel])), shown)
            for (scheme, shown), panel in product(members.items(), panels)
        ]

    def chart(self) -> Chart:
        """Return the chart, whose table has the rows of the CSV."""
        contents = self.contents()
        count = len(contents)
        across = 2 if count == 4 else min(count, 3)
        height = 1.9 if count <= 3 else 1.5
        page = Page(math.ceil(count / across), across, panels=count, height=height)
        panels = []
        for axes, (name, title, series) in zip(page.axes, contents, strict=True):
            axes.set_title("" if count == 1 else title)
            panel = Panel(axes, name or None, self.table, self.legend)
            self._draw_levels(panel, is_first=name not in [other.name or "" for other in panels])
            for one in series:
                self._draw_series(panel, one)
            for other in set(self._rows(panel, None, "fit")["series"]) - {*self.series}:
                self._add_fit(panel, other)
            panels.append(panel)
        self._draw_others(panels)
        self._scale(panels)
        place_side_by_side(panels if self.legend.seeds else [])
        title, _ = TEXTS[self.name]
        legend_title, _ = self.legend.add_exponents()
        if self.name == "best_lr_vs_depth":
            legend_title = "exponent of N, with its 95 % interval"
        subtitle, settings = self.entry["subtitle"], self.entry["settings"]
        figure = page.finish(title, subtitle, (), self.legend.all_handles(), legend_title, settings)
        lines = [f"{title}. {subtitle}.", settings, *self.entry.get("caption", "").split(" · ")]
        return Chart(figure, self.table.frame(), title, untypeset("\n".join([*lines, ""])))

    def _rows(self, panel: Panel, series: str | None, *kinds: str) -> pd.DataFrame:
        rows = self.rows[self.rows["panel"] == (panel.name or "")]
        rows = rows if series is None else rows[rows["series"] == series]
        return rows[rows["kind"].isin(kinds)]

    def _draw_levels(self, panel: Panel, is_first: bool) -> None:
        """Draw the levels of a panel; its first part adds them to the table."""
        levels = self._rows(panel, None, "level")
        if "x" in levels:  # a level that is a line over depth
            for series, line in levels[levels["x"].notna()].groupby("series", sort=False):
                look: Any = {"color": GREY, "ls": DASHES[1], "lw": 0.9}
                panel.lines(str(series), line[["x", "y"]], kind="level", **look)
                self.legend.entry(str(series), **look)
            levels = levels[levels["x"].isna()]
        band = self._rows(panel, "published", "reference")
        if len(band):
            panel.axes.axhspan(*band["y"], color=GREY, alpha=0.25, lw=0)
            panel.add(band[["y"]], series="published", kind="reference")
            self.legend.entry("published for Post-LN", patch=True, color=GREY, alpha=0.25, lw=0)
        for series, y in levels[["series", "y"]].to_numpy():
            dash = "-" if str(series).startswith("Bayes") else DASHES[1]
            panel.level(float(y), str(series) if is_first else None, self._label(series), dash)

    def _label(self, series: str) -> str:
        unrelated = f"unrelated states, {typeset('√2·‖F_0‖')}"
        return unrelated if series == "unrelated states" else str(series)

    def _draw_series(self, panel: Panel, series: str) -> None:
        """Draw the points or the line of a series, and add its fit."""
        style = self.styles[series]
        columns = ["x", "y", "low", "high", "n", "mark"]
        for kind in ("line", "training", "validation", "predicted"):
            lines = self._rows(panel, series, kind)[columns].assign(mark="")
            look = {"color": style["color"], "ls": style["linestyle"]}
            marker = {"marker": "o", "ms": 3} if kind == "validation" else {}
            panel.lines(series, lines, kind=kind, **look, **marker)
            if len(lines):
                self.legend.entry(self.label(series), **look)
        points = self._rows(panel, series, "point", "best")[[*columns, "kind"]]
        if len(points):
            panel.points(series, points, style)
            if self.name != "coordinate_check":
                self.legend.entry(self.label(series), **style)
            best = points[points["kind"] == "best"]
            if len(best):
                panel.ring(best["x"], best["y"], "best", color=style["color"])
        self._add_fit(panel, series)

    def _add_fit(self, panel: Panel, series: str) -> None:
        """Add the fit of a series to the table, and its exponent to the legend."""
        for fit in self._rows(panel, series, "fit").to_dict("records"):
            if "standard_error" in fit:
                numbers = fit["exponent"], fit["standard_error"], math.nan
                panel.add_fit(
                    series, Fit(*numbers, int(fit["n"]), int(fit["seeds"])), panel.name or ""
                )
                continue
            columns = ("n", "exponent", "exponent_low", "exponent_high", "seeds", "mark")
            values = {key: fit[key] for key in columns if fit[key] != ""}
            self.table.add(panel=panel.name, series=series, kind="fit", **values)
            if self.name == "best_lr_vs_depth":
                interval = Interval(*(fit[key] for key in columns[1:4]))
                self.legend.handles[series].set_label(f"{series}: {interval.text(2)}")

    def _draw_others(self, panels: Sequence[Panel]) -> None:
        """Draw published values and laws, and name the lines of a coordinate check."""
        for panel in panels:
            published = self._rows(panel, None, "reference").rename(columns={"series": "label"})
            panel.published(published[published["x"].notna()].drop(columns="panel"))
        for (name, (_, source)), dash in zip(PUBLISHED_LAWS.items(), DASHES[1:], strict=True):
            for i, panel in enumerate(panels):
                law = self._rows(panel, name, "law")[["x", "y"]]
                look: Any = {"color": GREY, "ls": dash, "lw": 0.8}
                if i == 0:
                    panel.lines(name, law, kind="law", zorder=1.5, **look)
                else:
                    panel.axes.plot(law["x"], law["y"], zorder=1.5, **look)
                if len(law):
                    self.legend.entry(f"{typeset_law(name)} ({source})", **look)
        if self.name == "best_lr_vs_depth":
            self.legend.spread = "95 % interval over seeds"
        if self.name == "coordinate_check":
            for series, style in sorted(self.styles.items(), key=lambda one: len(one[0])):
                self.legend.entry(series.split(", ")[0], color=style["color"])
            for layer in dict.fromkeys(series.split(", ")[1] for series in self.styles):
                words = layer if layer == "F" else f"{layer} layer"
                self.legend.entry(words, color=GREY, **LINE_STYLES[layer])

    def _scale(self, panels: Sequence[Panel]) -> None:
        """Give the panels their axes: equal scales of the values of one kind."""
        x = sorted(set(self.values["x"]))
        for panel in panels:
            if self.name == "loss_vs_lr":
                tried_axis(panel.axes, x, axis_number, "learning rate")
            elif self.name in X:
                number_axis(panel.axes, "x", x, log=self.name in LOG_X)
                panel.axes.set_xlabel(X[self.name])
            elif self.name.endswith("vs_step"):
                step_axis(panel.axes, int(x[0]), int(x[-1]))
            else:
                depth_axis(panel.axes, [int(value) for value in x])
                if self.name == "coordinate_check":
                    panel.axes.set_xlabel("width d")
        kinds = VALUES.get(self.name, {"": TEXTS[self.name][1]})
        kind_of = [
            next(kind for kind in kinds if (one.name or "").endswith(kind)) for one in panels
        ]
        for kind, words in kinds.items():
            same = [one for one, of in zip(panels, kind_of, strict=True) if of == kind]
            if not same:
                continue
            names = [panel.name or "" for panel in same]
            rows = self.rows[self.rows["panel"].isin(names) & self.rows["y"].notna()]
            log = self.name != "solved_vs_depth" and is_wide(rows["y"])
            log &= kind not in LINEAR_Y
            log |= self.name in LOG_Y
            y, low, high = rows[["y", "low", "high"]].to_numpy(float).T
            low = np.maximum(low, y[y > 0].min() / 3) if log else low
            values = [value for value in (*y, *low, *high) if math.isfinite(value)]
            for panel in same:
                panel.axes.set_ylabel(self.entry.get("y", words))
                number_axis(panel.axes, "y", values, log)


def number_in(text: str) -> float:
    """Return the last number of a text, 0 without one."""
    numbers = re.findall(r"[0-9.]+(?:e[+-]?[0-9]+)?", text)
    return float(numbers[-1]) if numbers else 0.0
