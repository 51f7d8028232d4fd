"""A chart while it is drawn: its panels, table, notes, and all that its legend explains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepstack.base.text import counted
from deepstack.plots.chart import COLUMNS, Chart, LineStyle, Options, PanelRows, Table
from deepstack.plots.group import Group, scheme_of
from deepstack.plots.page import Handle, Page
from deepstack.plots.panel import (
    CROWDED,
    MARKS,
    Panel,
    PointArtists,
    place_side_by_side,
    split_hidden,
)
from deepstack.plots.style import (
    COLUMN,
    GREY,
    depth_axis,
    is_wide,
    number_axis,
    scheme_style,
    setting_style,
    shade,
    step_axis,
)
from deepstack.plots.texts import font_note, plain
from deepstack.records import Run
from deepstack.runs.captions import caption_of, seeds_note, title_of
from deepstack.runs.fit import Fit, exponent_title
from deepstack.runs.runs import Runs
from deepstack.runs.series import Series, choose_series
from deepstack.runs.settings import (
    DEPTH,
    SCHEME,
    SEED,
    evenly_spaced,
)

T = TypeVar("T")
MOST_LINES = 6  # series in a panel; more have a panel for each scheme
MOST_PANELS = 15


class Drawing:
    """A chart while it is drawn: its runs, panels, table, notes, and what its legend explains.

    One rule places series.  A chart against depth has a line for each of them (`groups`); a chart
    against the step has a panel for each, with a shade for each depth (`curve_groups`).  Others
    have a panel for each series (`setting_groups`), or for each at one depth (`cells`).
    """

    def __init__(self, runs: Iterable[Run], options: Options, but: Sequence[str] = ()) -> None:
        """Split runs into series; `but`: settings that make no series."""
        self.runs, self.options, self.table = Runs(runs), options, Table()
        split = self.runs.split(but)
        self.series, self.depth_settings = list(split.series), split.depth_settings
        if options.ordered:
            self.series.sort(key=lambda s: self.runs.index(s.runs[0]))
        if options.schemes:
            self.series.sort(key=lambda s: options.schemes.index(scheme_of(s)))
        self.panels: list[Panel] = []
        self.shown: dict[Panel, tuple[dict[str, None], dict[str, dict[str, LineStyle]]]] = {}
        self.notes: list[str] = []
        self.handles: dict[str, Handle] = {}
        self.fits: dict[str, dict[str, Fit | None]] = {}  # of each line of the legend, by place
        self.marks: set[str] = set()
        self.point_artists: PointArtists = {}
        self.has_bands = False
        self.spread = "± 1 standard deviation"  # the meaning of bands and bars
        self.seeds: set[int] = set()
        self.hidden = 0  # points that a logarithmic axis does not show

        self.depths = sorted({depth for s in self.series for depth in s.depths})
        self.by_depth = False  # whether colours tell depths apart

    @cached_property
    def styles(self) -> dict[Series, dict[str, Any]]:
        """Colour, line and marker of each series: its scheme's, in every chart the same.

        If a scheme has several series, they are shades of its colour.
        """
        styles = {}
        for scheme in dict.fromkeys(map(scheme_of, self.series)):
            members = [s for s in self.series if scheme_of(s) == scheme]
            for i, s in enumerate(members):
                styles[s] = setting_style(scheme_style(scheme), i, len(members))
        return styles

    def groups(self, lines: int = MOST_LINES) -> list[Group]:
        """Return the panels of lines: one for each value of the setting that the user names.

        More than `lines` series have a panel for each scheme, if schemes have several of them.
        """
        schemes = set(map(scheme_of, self.series))
        key = self.runs.key(self.options.panels) if self.options.panels else DEPTH
        if key == DEPTH and len(self.series) > lines and 1 < len(schemes) < len(self.series):
            key = SCHEME
        members: dict[str, list[Series]] = {}
        for s in self.series:
            name = "" if key == DEPTH else self.runs.label(s.runs[0], [key])
            members.setdefault(name, []).append(s)
        return self.at_most([Group(name or None, of, self.depths) for name, of in members.items()])

    def curve_groups(self) -> list[Group]:
        """Return the panels of curves: one for each series, with a shade for each depth.

        Series of one depth share panels (see `groups`) where these hold CROWDED of them at most.
        If the user names the setting of the panels, each of its values has one, or one for each
        depth if several series share them.
        """
        panels = self.options.panels
        self.by_depth = len(self.depths) > 1
        if panels is None and self.by_depth:
            return self.setting_groups()
        groups = self.groups()
        if panels is None or not self.by_depth:
            crowded = max(group.curves for group in groups) > CROWDED
            few = panels is None and len(self.series) <= MOST_PANELS
            return self.setting_groups() if crowded and few else groups
        if self.runs.key(panels) != DEPTH and all(len(group.series) == 1 for group in groups):
            return groups
        self.by_depth = False
        cells = [
            Group(", ".join(filter(None, [group.name, f"N = {n}"])), group.series, [n])
            for group in groups
            for n in self.depths
        ]
        return self.at_most([cell for cell in cells if cell.runs])

    def setting_groups(
        self, most: int = MOST_PANELS, series: Sequence[Series] | None = None
    ) -> list[Group]:
        """Return a panel for each series, by default of all; the caption names those left out."""
        every = self.series if series is None else series
        chosen, left = choose_series(every, self.limit(most))
        self.notes += left
        return [Group(s.label if len(every) > 1 else None, [s], s.depths) for s in chosen]

    def cells(self, most: int = MOST_PANELS) -> list[Group]:
        """Return a panel for each series at its greatest depth; of only one series, at each depth.

        Names have the depth, if depths differ.
        """
        if len(self.series) == 1:
            self.by_depth = len(self.depths) > 1
            depths = self.at_most(self.depths, most)
            return [Group(f"N = {n}" if self.by_depth else None, self.series, [n]) for n in depths]
        groups = self.setting_groups(most)
        several = len({n for group in groups for n in group.depths}) > 1
        self.note("each at its greatest depth", when=any(len(g.depths) > 1 for g in groups))
        deepest = [(g.label, g.series, g.depths[-1]) for g in groups]
        return [Group(label + f", N = {n}" * several, s, [n]) for label, s, n in deepest]

    def first_seeds(self) -> list[tuple[Group, Run]]:
        """Return `cells`, each with its run of the lowest seed; a note names the seeds."""
        cells = [(cell, cell.runs[0]) for cell in self.cells()]
        seeds = sorted({int(run.get(SEED, 0)) for _, run in cells})
        self.note(f"seed {', '.join(map(str, seeds))}")
        return cells

    def at_most(self, panels: list[T], most: int = MOST_PANELS) -> list[T]:
        """Return evenly spaced panels, as many as are shown; a note counts them."""
        shown = evenly_spaced(panels, self.limit(most))
        self.note(f"{len(shown)} of {len(panels)} panels are shown", when=len(shown) < len(panels))
        return shown

    def limit(self, most: int) -> int:
        """Return the number of panels to show: `most`, or all if the user chose the schemes."""
        return 10**6 if self.options.schemes else most

    def style(self, series: Series, depth: int) -> dict[str, Any]:
        """Return colour, line and marker of a series at a depth; dark for deep."""
        if self.by_depth:
            colour = shade(self.depths[::-1].index(depth), len(self.depths))
            return {"color": colour, "linestyle": "-", "marker": "o"}
        return self.styles[series]

    def curve_style(self, series: Series, depth: int, curves: int) -> dict[str, Any]:
        """Return the style of one of so many curves of a panel; with a marker if it is crowded."""
        style = self.style(series, depth)
        marker = style["marker"] if curves > CROWDED and not self.by_depth else "None"
        return {"color": style["color"], "ls": style["linestyle"], "marker": marker, "ms": 3}

    def explain(self, groups: Iterable[Group], curves: int | None = None) -> None:
        """Add each colour of these groups to the legend: the depths, or the series.

        curves: the number in a panel, if these are curves and not points.
        """
        shown = {(s, n) for group in groups for s in group.series for n in group.depths if s.at(n)}
        lines = [(s, n) for s in self.series for n in self.depths if (s, n) in shown]
        for s, n in sorted(lines, key=lambda line: line[1]) if self.by_depth else lines:
            look = self.style(s, n) if curves is None else self.curve_style(s, n, curves)
            self.entry(f"N = {n}" if self.by_depth else s.label, **look)

    def above_zero(self, rows: pd.DataFrame, column: str = "y") -> pd.DataFrame:
        """Return the rows that a logarithmic axis shows; the caption counts the others."""
        self.hidden += int((rows[column] <= 0).sum())
        return rows[rows[column] > 0]

    def note(self, text: str, when: object = True) -> None:
        """Add a note to the caption, if the condition holds."""
        if when:
            self.notes.append(text)

    def entry(self, label: str, *, patch: bool = False, **style: Any) -> None:
        """Add a line, or a patch of colour, to the legend; the same one is there once."""
        handle = Patch(label=label, **style) if patch else Line2D([], [], label=label, **style)
        self.handles.setdefault(label, handle)

    def add_panels(
        self,
        names: Sequence[str | None],
        *,
        titles: Sequence[str] | None = None,
        columns: int | None = None,
        height: float | None = None,
    ) -> list[Panel]:
        """Make the panels and return them; titles: by default their names, none for an only one."""
        count, paper = len(names), self.options.style == "paper"
        across = columns or min(count, 2 if paper or count == 4 else 3)
        self.page = Page(
            math.ceil(count / across),
            across,
            panels=count,
            height=height or (1.9 if count == 1 else 1.5),
            width=self.options.width or (COLUMN if paper and across <= 2 else None),
            texts=not paper,
        )
        titles = titles or [name or "" if count > 1 else "" for name in names]
        for axes, name, title in zip(self.page.axes, names, titles, strict=True):
            axes.set_title(title)
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
        table = pd.DataFrame(self.table.rows, columns=list(COLUMNS))
        if kinds:
            table = table[table["kind"].isin(kinds)]
        if panels is not None:
            table = table[table["panel"].isin([panel.name for panel in panels])]
        return table

    def value_axis(
        self,
        label: str,
        panels: Sequence[Panel],
        *kinds: str,
        log: bool | None = None,
        include: float = math.nan,
    ) -> None:
        """Give panels one scale of values, around their rows (of these kinds) and `include`.

        log: by default whether the values are positive and far apart.  A band that reaches down to
        zero has no end on a log axis: it is cut at a third of the least value.
        """
        middle, low, high = self.rows(*kinds, panels=panels)[["y", "low", "high"]].to_numpy(float).T
        middle, edges = np.append(middle, include), np.append(low, high)
        edges = edges[np.isfinite(edges)]
        if log is None:
            log = is_wide(middle)
        if self.options.y_scale is not None:
            log = self.options.y_scale == "log"
        if log and len(positive := middle[middle > 0]):
            edges = np.maximum(edges, positive.min() / 3)
        values = [value for value in (*middle, *edges) if math.isfinite(value)]
        for panel in panels:
            panel.axes.set_ylabel(label)
            if values:
                number_axis(panel.axes, "y", values, log)

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
            self._scale_x(self.options.x_scale == "log")
        self.table.rows, lost = split_hidden(self.table.rows)
        self.hidden += lost
        words = (
            f"left out: {counted('{} points', self.hidden)} at or below 0, which no log axis has"
        )
        self.note(words, when=self.hidden)
        place_side_by_side(self.point_artists if self.seeds else {})
        legend_title = legend_title or self._add_exponents()
        caption = [*self.notes, *notes, *caption_of(self.runs, self.depth_settings)]
        subtitle = title_of(self.runs, self.series)
        handles = [*self.handles.values(), *self._explanations()]
        names = {str(row.get(key) or "") for row in self.table.rows for key in ("panel", "series")}
        labels = [str(handle.get_label()) for handle in handles]
        notice = font_note([title, subtitle, *caption, *names, *labels])
        caption += filter(None, [notice])
        figure = self.page.finish(title, subtitle, caption, handles, legend_title)
        text = "\n".join([f"{title}. {subtitle}.", *caption, ""]).replace("\u00a0", " ")
        panels = [
            PanelRows(panel.name or "", self.page.axes.index(panel.axes), shown, styles)
            for panel, (kinds, styles) in self.shown.items()
            if (shown := [kind for kind in kinds if kind not in ("level", "reference")])
        ]
        return Chart(figure, self.table.frame(), title, plain(text), panels, notice)

    def _add_exponents(self) -> str | None:
        """Add exponents to the labels of lines; return the legend's title, which names the places.

        `DeepNorm: 0.43 ± 0.03, –` has no fit at the second place.  The legend leaves out places
        where no line has one.
        """
        fits = [fit for at in self.fits.values() for fit in at.values()]
        if not any(fits):
            return None
        every = dict.fromkeys(chain.from_iterable(self.fits.values()))
        places = [place for place in every if any(at.get(place) for at in self.fits.values())]
        for line, at in self.fits.items():
            exponents = ", ".join(str(at[place] or "–") for place in places if place in at)
            self.handles[line].set_label(f"{line}: {exponents}" if exponents else line)
        title = exponent_title(fits)
        without = [place for place in every if place not in places]
        self.note(f"no exponent for {', '.join(without)}", when=without)
        return f"{title}: {', '.join(places)}" if len(every) > 1 else title

    def _scale_x(self, log: bool) -> None:
        """Give the panels of lines and points a linear or logarithmic x axis."""
        for panel in self.panels:
            x = [x for x in self.rows(panels=[panel])["x"] if math.isfinite(x)]
            if panel.axes.lines and x:
                number_axis(panel.axes, "x", x, log)

    def _explanations(self) -> list[Handle]:
        """Return the legend of marks, and of bands or error bars."""
        style: Any = {"color": GREY, "ls": "none"}
        entries: list[Handle] = [
            Line2D([], [], marker=marker, mfc="white", label=words, **style)
            for mark, (marker, words) in MARKS.items()
            if mark in self.marks
        ]
        if note := seeds_note(self.seeds):
            label = f"{self.spread}, {note}"
            band = Patch(color=GREY, alpha=0.3, lw=0, label=label)
            bar = Line2D([], [], marker="|", ms=7, label=label, **style)
            entries.append(band if self.has_bands else bar)
        return entries
