"""Decides which series and depths share a panel: one function for all charts.

A chart against depth has a line for each series (rule `lines`); a chart against the step has a
panel for each, with a shade for each depth (`curves`).  Others have a panel for each series
(`series`), or for each at one depth (`stacks`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from deepstack.plots.chart import Options
from deepstack.plots.panel import CROWDED
from deepstack.records import Run
from deepstack.runs.runs import Runs
from deepstack.runs.series import Series, choose_series
from deepstack.runs.settings import DEPTH, SCHEME, evenly_spaced, require

T = TypeVar("T")
Rule = Literal["lines", "curves", "series", "stacks"]
MOST_LINES = 4  # series in a panel, if schemes have several; more have a panel for each scheme
MOST_PANELS = 15


@dataclass(frozen=True)
class Group:
    """The series and depths that one panel shows; name: None for the only panel."""

    name: str | None
    series: Sequence[Series]
    depths: Sequence[int]

    @property
    def label(self) -> str:
        return self.name or self.series[0].label

    @property
    def curves(self) -> int:
        return len(self.series) * len(self.depths)

    @property
    def runs(self) -> list[Run]:
        return [run for s in self.series for n in self.depths for run in s.at(n)]


@dataclass
class Placement:
    """Places series into panels.

    runs: runs of the chart, among which labels tell series apart.
    series: their series.
    options: options of the user, who may name the setting of the panels.
    notes: sentences for the caption, on panels that are left out.
    by_depth: whether colours tell depths apart.
    """

    runs: Runs
    series: Sequence[Series]
    options: Options
    notes: list[str] = field(default_factory=list)
    by_depth: bool = False

    @property
    def depths(self) -> list[int]:
        return sorted({depth for s in self.series for depth in s.depths})

    def groups(self, rule: Rule, most: int, lines: int) -> list[Group]:
        """Return the groups of a rule, at most so many panels and lines in a panel."""
        if rule == "lines":
            return self.by_setting(lines)
        if rule == "curves":
            return self.curves()
        return self.each(most) if rule == "series" else self.stacks(most)

    def by_setting(self, lines: int = MOST_LINES) -> list[Group]:
        """Return a group for each value of the setting that the user names, else only one.

        Unless the user names one, more than `lines` series have a group for each scheme, if
        schemes have several series.
        """
        schemes = set(map(scheme_of, self.series))
        panels = self.options.panels
        key = self.runs.key(panels, "panels") if panels else DEPTH
        have_several = 1 < len(schemes) < len(self.series)
        if panels is None and have_several and len(self.series) > lines:
            key = SCHEME
        members: dict[str, list[Series]] = {}
        for s in self.series:
            name = "" if key == DEPTH else self.runs.label(s.runs[0], [key])
            members.setdefault(name, []).append(s)
        return self.at_most([Group(name or None, of, self.depths) for name, of in members.items()])

    def curves(self) -> list[Group]:
        """Return a group for each series, with a shade for each depth.

        Series of one depth share groups (see `by_setting`) where these hold CROWDED of them at
        most.  If the user names the setting of the panels, each of its values has one, or one for
        each depth if several series share them.
        """
        require(self.series, "no run has logged these values by step")
        panels = self.options.panels
        self.by_depth = len(self.depths) > 1
        if panels is None and self.by_depth:
            return self.each()
        groups = self.by_setting()
        if panels is None or not self.by_depth:
            crowded = max(group.curves for group in groups) > CROWDED
            few = panels is None and len(self.series) <= MOST_PANELS
            return self.each() if crowded and few else groups
        if self.runs.key(panels) != DEPTH and all(len(group.series) == 1 for group in groups):
            return groups
        self.by_depth = False
        cells = [
            Group(", ".join(filter(None, [group.name, f"N = {n}"])), group.series, [n])
            for group in groups
            for n in self.depths
        ]
        return self.at_most([cell for cell in cells if cell.runs])

    def each(self, most: int = MOST_PANELS) -> list[Group]:
        """Return a group for each series; a note names those left out."""
        chosen, left = choose_series(self.series, self.limit(most))
        self.notes += left
        return [Group(s.label if len(self.series) > 1 else None, [s], s.depths) for s in chosen]

    def stacks(self, most: int = MOST_PANELS) -> list[Group]:
        """Return a group for each series at its greatest depth; of only one, at each depth.

        Names have the depth, if depths differ.
        """
        if len(self.series) == 1:
            self.by_depth = len(self.depths) > 1
            depths = self.at_most(self.depths, most)
            return [Group(f"N = {n}" if self.by_depth else None, self.series, [n]) for n in depths]
        groups = self.each(most)
        several = len({n for group in groups for n in group.depths}) > 1
        if any(len(group.depths) > 1 for group in groups):
            self.notes.append("each at its greatest depth")
        deepest = [(g.label, g.series, g.depths[-1]) for g in groups]
        return [Group(label + f", N = {n}" * several, s, [n]) for label, s, n in deepest]

    def at_most(self, panels: Sequence[T], most: int = MOST_PANELS) -> list[T]:
        """Return evenly spaced panels, as many as are shown; a note counts them."""
        shown = evenly_spaced(panels, self.limit(most))
        if len(shown) < len(panels):
            self.notes.append(f"{len(shown)} of {len(panels)} panels are shown")
        return shown

    def limit(self, most: int) -> int:
        """Return the number of panels to show: `most`, or all if the user chose the schemes."""
        return 10**6 if self.options.schemes else most


def scheme_of(series: Series) -> str:
    """Return the name of the scheme of a series."""
    return str(series.runs[0].get(SCHEME, "?"))
