"""A chart while it is drawn: its panels, table, notes, and all that its legend explains."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from deepstack.analysis.captions import caption_of, seeds_note, title_of
from deepstack.analysis.selection import find_key
from deepstack.analysis.settings import (
    SCHEME,
    Series,
    label_of,
    order_of,
    split_series,
    values_of,
    varying_settings,
)
from deepstack.plots.chart import Chart, Options, PanelRows, Table
from deepstack.plots.exponents import Exponents
from deepstack.plots.page import Handle, Page, typeset
from deepstack.plots.panel import MARKS, Panel
from deepstack.plots.style import (
    COLUMN,
    GREY,
    depth_axis,
    extent,
    log_axis,
    number,
    plain_axis,
    scheme_style,
    setting_style,
    step_axis,
)
from deepstack.records import Run

T = TypeVar("T")
MOST_LINES = 6  # series in a panel up to which several settings share it


class Drawing:
    """A chart while it is drawn: its runs, panels, table, notes, and what its legend explains."""

    def __init__(self, runs: Sequence[Run], options: Options, but: Sequence[str] = ()) -> None:
        """Split runs into series; `but`: settings that make no series."""
        self.runs, self.options, self.table = runs, options, Table()
        self.but = but
        self.series, self.depth_settings = split_series(runs, but)
        if options.ordered:
            order = {run: i for i, run in enumerate(runs)}
            self.series.sort(key=lambda s: min(order[run] for run in s.runs))
        if options.schemes:
            self.series.sort(key=lambda s: options.schemes.index(scheme_of(s)))
        self.panels: list[Panel] = []
        self.shown: dict[Panel, tuple[dict[str, None], dict[str, tuple[str, bool]]]] = {}
        self.notes: list[str] = []
        self.handles: dict[str, Handle] = {}
        self.exponents = Exponents()
        self.levels: dict[tuple[str, Any], set[float]] = {}
        self.marks: set[str] = set()
        self.has_bands = False
        self.spread = "± 1 standard deviation"  # the meaning of bands and bars
        self.seeds: set[int] = set()
        self.published: dict[str, Line2D] = {}

    @cached_property
    def styles(self) -> dict[Series, dict[str, Any]]:
        """Colour, line and marker of each series: those of its scheme, everywhere the same.

        If a scheme has several series, the values of its other settings are shades: of all runs
        that were given, however few of them this chart can show.
        """
        runs = self.options.runs or self.runs
        every, depth_settings = split_series(runs, self.but)
        ignored = (SCHEME, *depth_settings, *self.but)
        keys = [key for key in varying_settings(runs) if key not in ignored]
        count = Counter(map(scheme_of, every))
        several = {values_of(s.runs[0], keys) for s in every if count[scheme_of(s)] > 1}
        shades = sorted(several, key=lambda values: [order_of(value) for value in values])
        styles = {}
        for s in self.series:
            values = values_of(s.runs[0], keys)
            shade = (shades.index(values), len(shades)) if values in shades else (0, 1)
            styles[s] = setting_style(scheme_style(scheme_of(s)), *shade)
        return styles

    def groups(self) -> list[tuple[str, list[Series]]]:
        """Return name and members of each group of series that has separate panels.

        The user names the setting; else many series of several settings have panels by scheme.
        """
        schemes = set(map(scheme_of, self.series))
        key: str | None = None
        if self.options.panels is not None:
            key = find_key(self.options.panels, self.runs)
        elif len(self.series) > MOST_LINES and 1 < len(schemes) < len(self.series):
            key = SCHEME
        groups: dict[str, list[Series]] = {}
        for s in self.series:
            name = "" if key is None else label_of(s.runs[0], [key], self.runs)
            groups.setdefault(name, []).append(s)
        return list(groups.items())

    def note(self, text: str, when: object = True) -> None:
        """Add a note to the caption, if the condition holds."""
        if when:
            self.notes.append(text)

    def entry(self, label: str, *, patch: bool = False, **style: Any) -> None:
        """Add a line, or a patch of colour, to the legend; the same one is there once."""
        handle = Patch(label=label, **style) if patch else Line2D([], [], label=label, **style)
        self.handles.setdefault(f"{label} {style}", handle)

    def note_hollow(self) -> None:
        """State in the caption that marked points are left out of the fits, if there are any."""
        self.note("hollow points are left out of the fits", when=self.marks)

    def ring_entry(self, label: str) -> None:
        """Add the ring around best points to the legend."""
        self.entry(label, ls="none", marker="o", ms=9, mfc="none", mec=GREY)

    def limit(self, most: int) -> int:
        """Return the number of panels to show: `most`, or all if the user chose the schemes."""
        return max(most, len(self.series)) if self.options.schemes else most

    def add_panels(
        self,
        names: Sequence[str | None],
        *,
        titles: Sequence[str] | None = None,
        columns: int | None = None,
        height: float | None = None,
    ) -> list[Panel]:
        """Make the panels and return them; titles: by default their names, none for an only one."""
        count = len(names)
        across = columns or (count if count <= 3 else 2 if count == 4 else 3)
        high = height or (1.9 if count == 1 else 1.5)
        paper, width = self.options.style == "paper", self.options.width
        if paper and columns is None:
            across = min(across, 2)
        if paper and width is None and across <= 2:
            width = COLUMN
        rows = math.ceil(count / across)
        self.page = Page(rows, across, panels=count, height=high, width=width, texts=not paper)
        for i, (axes, name) in enumerate(zip(self.page.axes, names, strict=True)):
            axes.set_title(titles[i] if titles else (name or "") if count > 1 else "")
            self.panels.append(Panel(self, axes, name or None))
        return self.panels

    def fill(
        self, names: Sequence[str | None], contents: Iterable[T], **layout: Any
    ) -> Iterator[tuple[Panel, T]]:
        """Make panels (see `add_panels`) and yield each with its content.

        The caller draws the content; published values follow on top.
        """
        for panel, content in zip(self.add_panels(names, **layout), contents, strict=True):
            yield panel, content
            panel.published()

    def rows(self, *kinds: str, panels: Sequence[Panel] | None = None) -> pd.DataFrame:
        """Return the rows of the table so far, of these kinds and panels."""
        table = pd.DataFrame(self.table.rows, columns=["panel", "series", "kind", "x", "y", "low",
                                                       "high", "n"])  # fmt: skip
        chosen = table["kind"].isin(kinds) if kinds else table["kind"].notna()
        if panels is not None:
            chosen &= table["panel"].isin([panel.name for panel in panels])
        return table[chosen]

    def value_axis(
        self,
        label: str,
        panels: Sequence[Panel],
        *kinds: str,
        log: bool = True,
        include: float = math.nan,
    ) -> None:
        """Give panels one scale of values, around their rows (of these kinds) and `include`.

        A band that reaches down to zero has no end on a log axis: it is cut at a third of the least
        value.
        """
        if self.options.y_scale is not None:
            log = self.options.y_scale == "log"
        middle, low, high = self.rows(*kinds, panels=panels)[["y", "low", "high"]].to_numpy(float).T
        middle, edges = np.append(middle, include), np.append(low, high)
        edges = edges[np.isfinite(edges)]
        if log and len(positive := middle[middle > 0]):
            edges = np.maximum(edges, positive.min() / 3)
        values = [value for value in (*middle, *edges) if math.isfinite(value)]
        for panel in panels:
            panel.axes.set_ylabel(label)
            if log:
                log_axis(panel.axes, "y", *extent(values))
            elif values:
                plain_axis(panel.axes, values)

    def is_wide(self, panels: Sequence[Panel]) -> bool:
        """Return whether the positive values of panels lie so far apart that a log axis helps."""
        values = self.rows(panels=panels)[["y", "low", "high"]].to_numpy(float)
        positive = values[np.isfinite(values) & (values > 0)]
        return bool(len(positive)) and positive.max() / positive.min() > 12

    def depth_axes(self, depths: Sequence[int], label: str | None = None) -> None:
        """Give all panels an axis of depth, or of another size with this label."""
        for panel in self.panels:
            depth_axis(panel.axes, depths)
            if label is not None:
                panel.axes.set_xlabel(label)

    def step_axes(self) -> None:
        """Give all panels the same axis of steps, around the rows of the table."""
        steps = self.rows()["x"]
        for panel in self.panels:
            step_axis(panel.axes, int(steps.min()), int(steps.max()))

    def finish(self, title: str, *notes: str, legend_title: str | None = None) -> Chart:
        """Return the chart with its legend and caption.

        The caption has the drawing's notes, those on exponents, `notes`, and the runs' settings.
        """
        drawn = {r.get("panel") for r in self.table.rows if r["kind"] not in ("level", "reference")}
        for panel in self.panels:
            if panel.name not in drawn:
                style: Any = {"color": GREY, "ha": "center", "transform": panel.axes.transAxes}
                panel.axes.text(0.5, 0.5, "no value", **style)
        if self.options.x_scale is not None:
            self._scale_x(self.options.x_scale)
        every = [*self.notes, *self.exponents.notes(), *notes]
        caption = [*every, *caption_of(self.runs, self.depth_settings)]
        subtitle = title_of(self.runs, self.series)
        handles = [*self.exponents.handles(), *self.handles.values(), *self._explanations()]
        legend_title = legend_title or self.exponents.title()
        figure = self.page.finish(title, subtitle, caption, handles, legend_title)
        text = "\n".join([f"{title}. {subtitle}.", *caption, ""]).replace("\u00a0", " ")
        caption_text = re.sub(r"\$_\{(.*?)\}\$", r"_\1", text)
        panels = [
            PanelRows(panel.name or "", self.page.axes.index(panel.axes), shown, styles)
            for panel, (kinds, styles) in self.shown.items()
            if (shown := [kind for kind in kinds if kind not in ("level", "reference")])
        ]
        return Chart(figure, self.table.frame(), title, caption_text, panels)

    def _scale_x(self, scale: str) -> None:
        """Give the panels of lines and points a linear or logarithmic x axis."""
        for panel in self.panels:
            x = self.rows(panels=[panel])["x"].to_numpy(float)
            x = x[np.isfinite(x) & (x > 0)] if scale == "log" else x[np.isfinite(x)]
            if not panel.axes.lines or not len(x):
                continue
            if scale == "log":
                log_axis(panel.axes, "x", *extent(x.tolist()))
                continue
            margin = 0.04 * (x.max() - x.min()) or 0.5
            panel.axes.set(xscale="linear", xlim=(x.min() - margin, x.max() + margin))
            panel.axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            panel.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
            panel.axes.xaxis.set_minor_locator(NullLocator())

    def _explanations(self) -> list[Handle]:
        """Return the legend of levels, marks, bands and published values."""
        entries: list[Handle] = []
        for (label, dash), values in self.levels.items():
            words = label.format(f" {min(values):.3g}" if len(values) == 1 else "")
            entries.append(Line2D([], [], color=GREY, lw=0.9, ls=dash, label=words))
        style: Any = {"color": GREY, "mfc": "white", "ls": "none"}
        for mark, (marker, words) in MARKS.items():
            if mark in self.marks:
                entries.append(Line2D([], [], marker=marker, label=words, **style))
        if note := seeds_note(self.seeds):
            label = f"{self.spread}, {note}"
            if self.has_bands:
                entries.append(Patch(color=GREY, alpha=0.3, lw=0, label=label))
            else:
                style = {"marker": "|", "ms": 7, "ls": "none", "color": GREY}
                entries.append(Line2D([], [], label=label, **style))
        return entries + list(self.published.values())


def scheme_of(series: Series) -> str:
    """Return the name of the scheme of a series."""
    return str(series.runs[0].get(SCHEME, "?"))


def axis_label(
    runs: Sequence[Run], name: str, words: str, sections: Sequence[str] = ("columns", "layers")
) -> str:
    """Return words with the symbol and unit that the runs state: `model update ‖ΔF‖`.

    sections: of columns.json, in the order in which the name is looked up.
    """
    for run in runs:
        for section in sections:
            entry = run.columns.get(section, {}).get(name)
            if isinstance(entry, dict):
                unit = f" ({entry['unit']})" if entry.get("unit") else ""
                return f"{words} {typeset(str(entry.get('symbol', '')))}".rstrip() + unit
    return words
