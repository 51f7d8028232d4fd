"""Draws the figures of the experiments again from what git tracks.

    python experiments/redraw.py [--check] [PART OF A PATH …]

figures.yaml lists them.  Figures of published runs are drawn from the runs.  The other figures are
drawn from the CSV beside them, in the style of `deepstack plot`, or by the script of their study.
--check writes nothing: it fails where the drawn values differ from the tracked CSV.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from matplotlib.patches import Rectangle

from deepstack.plots import (
    CELL_GAP,
    CHARTS,
    DASHES,
    GREY,
    MOST_LINES,
    OUTCOME_COLOURS,
    ROW_HEIGHT,
    Chart,
    Legend,
    Options,
    Page,
    Panel,
    Table,
    axis_number,
    deepstack_style,
    depth_axis,
    is_wide,
    map_axes,
    number_axis,
    place_side_by_side,
    save,
    scheme_style,
    setting_style,
    shades,
    step_axis,
    tried_axis,
    typeset,
    untypeset,
)
from deepstack.runs import OUTCOME_WORDS, Fit, Interval, Runs
from deepstack.schemes import SCHEMES
from deepstack.tools.coordinates import LINE_STYLES
from deepstack.tools.transfer import PUBLISHED_LAWS, typeset_law

HERE = Path(__file__).parent
ROOT = HERE.parent
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
}
OF_DEPTHS = ("loss_vs_lr", "loss_vs_step")  # charts whose colours tell depths apart
SIZES = {"update": typeset("‖x_{l,t} − x_{l,0}‖/√d"), "size": typeset("‖x_{l,t}‖/√d")}


def entries() -> dict[str, dict[str, str]]:
    """Return the texts of each figure by its path below experiments, without a suffix."""
    return dict(yaml.safe_load((HERE / "figures.yaml").read_text(encoding="utf-8")))


def draw(name: str) -> Chart:
    """Return the chart of a figure: of its published runs, or of its CSV."""
    entry, stem = entries()[name], Path(name).name
    if "runs" in entry:
        step = entry.get("at_step")
        options = Options(at_step=None if step is None else int(step))
        return CHARTS[stem](Runs.below(ROOT / entry["runs"]), options=options)
    with deepstack_style():
        if stem == "outcomes":
            return draw_outcomes(pd.read_csv(HERE / f"{name}.csv"), entry)
        return Redrawing(stem, pd.read_csv(HERE / f"{name}.csv"), entry).chart()


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
        if self.name in OF_DEPTHS:
            depth_of = {series: int(series.split()[-1]) for series in self.series}
            colours = shades(sorted(set(depth_of.values()), reverse=True))
            look: Any = {"linestyle": "-", "marker": "o"}
            return {series: look | {"color": colours[depth]} for series, depth in depth_of.items()}
        styles = {}
        for members in self.by_scheme().values():
            for i, series in enumerate(members):
                scheme = self.scheme_of(series)
                styles[series] = setting_style(scheme_style(scheme), i, len(members))
        return styles

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
        by_layer_or_depth = self.name in (*OF_DEPTHS, "coordinate_check")
        members = {} if by_layer_or_depth else self.by_scheme()
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
        for series, y in self._rows(panel, None, "level")[["series", "y"]].to_numpy():
            dash = "-" if str(series).startswith("Bayes") else DASHES[1]
            panel.level(float(y), str(series) if is_first else None, self._label(series), dash)

    def _label(self, series: str) -> str:
        unrelated = f"unrelated states, {typeset('√2·‖F_0‖')}"
        return unrelated if series == "unrelated states" else str(series)

    def _draw_series(self, panel: Panel, series: str) -> None:
        """Draw the points or the line of a series, and add its fit."""
        style = self.styles[series]
        columns = ["x", "y", "low", "high", "n", "mark"]
        for kind in ("line", "training", "validation"):
            lines = self._rows(panel, series, kind)[columns].assign(mark="")
            look = {"color": style["color"], "ls": style["linestyle"]}
            marker = {"marker": "o", "ms": 3} if kind == "validation" else {}
            panel.lines(series, lines, kind=kind, **look, **marker)
            if len(lines):
                label = f"N = {series.split()[-1]}" if self.name in OF_DEPTHS else series
                self.legend.entry(label, **look)
        points = self._rows(panel, series, "point", "best")[[*columns, "kind"]]
        if len(points):
            named = self.name != "coordinate_check"
            panel.points(series, points, style, entry=named)
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
            panel.published(published.drop(columns="panel"))
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
            elif self.name.endswith("vs_step"):
                step_axis(panel.axes, int(x[0]), int(x[-1]))
            else:
                depth_axis(panel.axes, [int(value) for value in x])
                if self.name == "coordinate_check":
                    panel.axes.set_xlabel("width d")
        kinds = SIZES if self.name == "coordinate_check" else {"": TEXTS[self.name][1]}
        for kind, words in kinds.items():
            same = [panel for panel in panels if (panel.name or "").endswith(kind)]
            names = [panel.name or "" for panel in same]
            rows = self.rows[self.rows["panel"].isin(names) & self.rows["y"].notna()]
            log = self.name != "solved_vs_depth" and is_wide(rows["y"])
            log |= self.name in ("update_vs_depth", "best_lr_vs_depth", "coordinate_check")
            y, low, high = rows[["y", "low", "high"]].to_numpy(float).T
            low = np.maximum(low, y[y > 0].min() / 3) if log else low
            values = [value for value in (*y, *low, *high) if math.isfinite(value)]
            for panel in same:
                panel.axes.set_ylabel(self.entry.get("y", words))
                number_axis(panel.axes, "y", values, log)


def draw_outcomes(rows: pd.DataFrame, entry: dict[str, str]) -> Chart:
    """Return the map of outcomes in a CSV: a box for each series and depth, split among seeds."""
    table, legend = Table(), Legend()
    names = list(dict.fromkeys(rows["series"]))
    depths = sorted(set(rows["x"]))
    panels = list(dict.fromkeys(rows["panel"]))
    page = Page(1, len(panels), height=max(0.3, ROW_HEIGHT * len(names)))
    for axes, name in zip(page.axes, panels, strict=True):
        axes.set_title(name)
        panel = Panel(axes, name, table, legend)
        map_axes(axes, depths, names, page.width / len(panels))
        for (series, x), cell in rows[rows["panel"] == name].groupby(["series", "x"], sort=False):
            left, y = depths.index(x) - 0.5 + CELL_GAP / 2, names.index(series) - 0.5 + CELL_GAP
            for row in cell.to_dict("records"):
                share = (1 - CELL_GAP) * row["n"] / cell["n"].sum()
                style: Any = {"color": OUTCOME_COLOURS[row["kind"]], "lw": 0}
                axes.add_patch(Rectangle((left, y), share, 1 - 2 * CELL_GAP, zorder=2, **style))
                left += share
            panel.add(cell.drop(columns="panel"))
    for kind, colour in OUTCOME_COLOURS.items():
        if kind in set(rows["kind"]):
            legend.entry(OUTCOME_WORDS[kind], patch=True, color=colour, lw=0)
    title, handles = "Which settings learn, at each depth", legend.all_handles()
    figure = page.finish(title, entry["subtitle"], (), handles, settings=entry["settings"])
    lines = [f"{title}. {entry['subtitle']}.", entry["settings"], *entry["caption"].split(" · ")]
    return Chart(figure, table.frame(), title, "\n".join([*lines, ""]))


def differs(chart: Chart, path: Path) -> bool:
    """Return whether a chart has other values than a CSV, in any order of the rows."""
    tables = []
    for table in (chart.data, pd.read_csv(path)):
        texts = [name for name in table if name in ("panel", "series", "kind", "mark")]
        numbers = [column for column in table if column not in texts]
        ordered = table.sort_values([*texts, *numbers], ignore_index=True)
        tables.append((ordered[sorted(texts)].fillna(""), ordered[sorted(numbers)].astype(float)))
    (texts, numbers), (tracked_texts, tracked) = tables
    if not texts.equals(tracked_texts) or list(numbers) != list(tracked):
        return True
    return not np.allclose(numbers, tracked, rtol=1e-6, atol=0, equal_nan=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="only figures whose path has one of these texts")
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    args = parser.parse_args()
    names = [n for n in entries() if not args.parts or any(part in n for part in args.parts)]
    differing = []
    for name in names:
        if script := entries()[name].get("script"):
            if not args.check:
                subprocess.run([sys.executable, HERE / script], check=True, stdout=sys.stderr)
                print((HERE / name).with_suffix(".png").relative_to(ROOT))
            continue
        path, chart = HERE / name, draw(name)
        if differs(chart, path.with_suffix(".csv")):
            differing.append(name)
        if not args.check:
            save(chart, path.parent, path.name, ("png",))
            print(path.with_suffix(".png").relative_to(ROOT))
    if differing:
        sys.exit(f"other values than in the tracked CSV: {', '.join(differing)}")


if __name__ == "__main__":
    main()
