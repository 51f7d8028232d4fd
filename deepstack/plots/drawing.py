"""A chart while it is drawn: its series, panels, table, legend and notes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from deepstack.base.text import counted
from deepstack.plots.chart import Chart, Options, Table, begin_drawing
from deepstack.plots.group import MOST_LINES, MOST_PANELS, Group, Placement, Rule, scheme_of
from deepstack.plots.legend import Legend
from deepstack.plots.page import Page
from deepstack.plots.panel import CROWDED, Panel, place_side_by_side, split_hidden
from deepstack.plots.style import (
    COLUMN_WIDTH,
    GREY,
    depth_axis,
    is_wide,
    number_axis,
    scheme_style,
    setting_style,
    shade,
    step_axis,
)
from deepstack.plots.texts import font_note, untypeset
from deepstack.records import Run
from deepstack.runs.captions import caption_of, runs_notes, settings_line, title_of
from deepstack.runs.runs import Runs
from deepstack.runs.series import Series
from deepstack.runs.settings import (
    SEED,
)

T = TypeVar("T")


class Drawing:
    """A chart while it is drawn: its runs and series, panels, table, legend and notes.

    `groups` says which series share a panel, `arrange` makes the panels.  Panels draw rows and add
    them to the table and the legend; `finish` makes the chart.
    """

    def __init__(self, runs: Runs, options: Options, but: Sequence[str] = ()) -> None:
        """Split runs into series; `but`: settings that make no series."""
        self.runs, self.options, self.table = runs, options, Table()
        split = self.runs.split(but)
        self.series, self.depth_settings = list(split.series), split.depth_settings
        if options.ordered:
            self.series.sort(key=lambda s: self.runs.index(s.runs[0]))
        if options.schemes:
            self.series.sort(key=lambda s: options.schemes.index(scheme_of(s)))
        self.panels: list[Panel] = []
        self.legend = Legend()
        self.notes: list[str] = []
        self.meanings: list[str] = []
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

    def groups(
        self,
        rule: Rule = "lines",
        most: int = MOST_PANELS,
        lines: int = MOST_LINES,
        series: Sequence[Series] | None = None,
    ) -> list[Group]:
        """Return the series and depths of each panel; notes count or name those left out.

        rule: lines, curves, series or stacks (see `deepstack.plots.group`).
        most, lines: limits of panels, and of lines in a panel.
        series: series to place, by default all.
        """
        every = self.series if series is None else series
        placement = Placement(self.runs, every, self.options, by_depth=self.by_depth)
        groups = placement.groups(rule, most, lines)
        self.by_depth = placement.by_depth
        self.notes += placement.notes
        return groups

    def at_most(self, panels: Sequence[T]) -> list[T]:
        """Return evenly spaced panels, as many as are shown; a note counts them."""
        placement = Placement(self.runs, self.series, self.options)
        shown = placement.at_most(panels)
        self.notes += placement.notes
        return shown

    def first_seeds(self) -> list[tuple[Group, Run]]:
        """Return the groups `stacks`, each with its run of the lowest seed; a note names these."""
        cells = [(cell, cell.runs[0]) for cell in self.groups("stacks")]
        seeds = sorted({int(run.get(SEED, 0)) for _, run in cells})
        self.note(f"seed {', '.join(map(str, seeds))}")
        return cells

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

    def define(self, text: str, when: object = True) -> None:
        """Add a definition to the text beside the figure, if the condition holds."""
        if when:
            self.meanings.append(text)

    def entry(self, label: str, *, patch: bool = False, **style: Any) -> None:
        """Add a line, or a patch of colour, to the legend; the same one is there once."""
        self.legend.entry(label, patch=patch, **style)

    def arrange(
        self,
        contents: Iterable[T],
        names: Sequence[str | None] | None = None,
        *,
        titles: Sequence[str] | None = None,
        columns: int | None = None,
        height: float | None = None,
        published: bool = True,
    ) -> Iterator[tuple[Panel, T]]:
        """Make a panel for each content and yield both; the caller draws the content.

        names: names of the panels in the table, by default those of groups.
        titles: titles of the panels, by default their names; an only panel has none.
        published: whether published values follow on top.
        """
        begin_drawing()
        every = list(contents)
        names = [getattr(one, "name", None) for one in every] if names is None else names
        self.panels += self._add_panels(names, titles, columns, height)
        reference = self.options.reference if published else None
        for panel, content in zip(self.panels, every, strict=True):
            yield panel, content
            if reference is not None:
                panel.published(reference)

    def _add_panels(
        self,
        names: Sequence[str | None],
        titles: Sequence[str] | None,
        columns: int | None,
        height: float | None,
    ) -> Iterator[Panel]:
        """Make the page, and yield a panel for each name."""
        count, paper = len(names), self.options.style == "paper"
        across = columns or min(count, 2 if paper or count == 4 else 3)
        self.page = Page(
            math.ceil(count / across),
            across,
            panels=count,
            height=height or (1.9 if count == 1 else 1.5),
            width=self.options.width or (COLUMN_WIDTH if paper and across <= 2 else None),
            texts=not paper,
        )
        titles = titles or [name or "" if count > 1 else "" for name in names]
        for axes, name, title in zip(self.page.axes, names, titles, strict=True):
            axes.set_title(title)
            yield Panel(axes, name or None, self.table, self.legend)

    def rows(self, *kinds: str, panels: Sequence[Panel] | None = None) -> pd.DataFrame:
        """Return the rows of the table so far, of these kinds and panels."""
        table = self.table.chosen(kinds)
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
        most: float = math.inf,
    ) -> None:
        """Give panels one scale of values, around their rows (of these kinds) and `include`.

        log: by default whether the values are positive and far apart.  A band that reaches down to
            zero has no end on a log axis: it is cut at a third of the least value.
        most: the upper end of the scale, beyond which values are not shown.
        """
        middle, low, high = self.rows(*kinds, panels=panels)[["y", "low", "high"]].to_numpy(float).T
        middle, edges = np.append(middle, include), np.append(low, high)
        edges = edges[np.isfinite(edges)]
        if log is None:
            log = is_wide(np.minimum(middle, most))
        if self.options.y_scale is not None:
            log = self.options.y_scale == "log"
        if log and len(positive := middle[middle > 0]):
            edges = np.maximum(edges, positive.min() / 3)
        values = [min(value, most) for value in (*middle, *edges) if math.isfinite(value)]
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

        Under the figure stand the notes, and width, steps and rate in one line. The chart's caption
        has the definitions and every setting of the runs too.
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
        words = f"{counted('{} points', self.hidden)} at or below 0 not shown (log axis)"
        self.note(words, when=self.hidden)
        place_side_by_side(self.panels if self.legend.seeds else [])
        if legend_title is None:
            legend_title, note = self.legend.add_exponents()
            self.define(note, when=note)
        notes = (*self.notes, *notes, *runs_notes(self.runs))
        caption = [*self.meanings, *notes, *caption_of(self.runs, self.depth_settings)]
        subtitle = title_of(self.runs, self.series)
        handles = self.legend.all_handles()
        names = {str(row.get(key) or "") for row in self.table.rows for key in ("panel", "series")}
        labels = [str(handle.get_label()) for handle in handles]
        notice = font_note([title, subtitle, *caption, *names, *labels])
        caption += filter(None, [notice])
        notes = (*notes, *filter(None, [notice]))
        line = settings_line(self.runs, self.depth_settings)
        figure = self.page.finish(title, subtitle, notes, handles, legend_title, line)
        text = "\n".join([f"{title}. {subtitle}.", *caption, ""]).replace("\u00a0", " ")
        panels = self.table.panel_rows(self.page.axes)
        return Chart(figure, self.table.frame(), title, untypeset(text), panels, notice)

    def _scale_x(self, log: bool) -> None:
        """Give the panels of lines and points a linear or logarithmic x axis."""
        for panel in self.panels:
            x = [x for x in self.rows(panels=[panel])["x"] if math.isfinite(x)]
            if panel.axes.lines and x:
                number_axis(panel.axes, "x", x, log)
