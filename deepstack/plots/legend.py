"""The legend of a chart: its entries, fitted exponents, marks, and the meaning of bands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepstack.plots.page import Handle
from deepstack.plots.style import DIVERGED_MARKER, GREY
from deepstack.runs.captions import seeds_note
from deepstack.runs.fit import Fit, exponent_title
from deepstack.runs.statistics import SOME_DIVERGED

ALL_DIVERGED = "all seeds diverged: last finite value"
EDGE_RATE = "edge"
AT_CHANCE = "at_chance"
# Marks of points, in the order of the legend: marker and words.
MARKS = {
    "saturated": ("o", "saturated: above 0.3 of unrelated states"),
    SOME_DIVERGED: ("o", "some seeds diverged: mean of the others"),
    "diverged": (DIVERGED_MARKER, "diverged"),
    ALL_DIVERGED: (DIVERGED_MARKER, ALL_DIVERGED),
    EDGE_RATE: ("o", "best rate tried lies at the edge"),
    AT_CHANCE: ("o", "no seed learnt: at chance or worse"),
}


@dataclass
class Legend:
    """The legend of a chart, collected while panels are drawn.

    spread: meaning of bands and bars.
    handles: entry of each label.
    fits: fits of each line, by the place where they were made.
    marks: kinds of marked points that are drawn.
    seeds: numbers of seeds of the drawn bands and bars.
    has_bands: whether a deviation is drawn as a band.
    """

    spread: str = "± 1 standard deviation"
    handles: dict[str, Handle] = field(default_factory=dict)
    fits: dict[str, dict[str, Fit | None]] = field(default_factory=dict)
    marks: set[str] = field(default_factory=set)
    seeds: set[int] = field(default_factory=set)
    has_bands: bool = False

    def entry(self, label: str, *, patch: bool = False, **style: Any) -> None:
        """Add a line, or a patch of colour; the same label is there once."""
        handle = Patch(label=label, **style) if patch else Line2D([], [], label=label, **style)
        self.handles.setdefault(label, handle)

    def add_marks(self, marks: Iterable[str], ends: bool = False) -> None:
        """Add the marks of points that are drawn; ends: whether they end lines."""
        for mark in filter(None, marks):
            self.marks.add(ALL_DIVERGED if mark == "diverged" and not ends else mark)

    def add_exponents(self) -> tuple[str | None, str]:
        """Add exponents to the labels of lines; return the legend's title and a note, or ''.

        `DeepNorm: 0.43 ± 0.03, –` has no fit at the second place.  The title names the places; the
        note names those where no line has a fit, which the legend leaves out.
        """
        fits = [fit for at in self.fits.values() for fit in at.values()]
        if not any(fits):
            return None, ""
        every = dict.fromkeys(chain.from_iterable(self.fits.values()))
        places = [place for place in every if any(at.get(place) for at in self.fits.values())]
        for line, at in self.fits.items():
            exponents = ", ".join(str(at[place] or "–") for place in places if place in at)
            self.handles[line].set_label(f"{line}: {exponents}" if exponents else line)
        title = exponent_title(fits)
        without = [place for place in every if place not in places]
        note = f"no exponent for {', '.join(without)}" if without else ""
        return (f"{title}: {', '.join(places)}" if len(every) > 1 else title), note

    def all_handles(self) -> list[Handle]:
        """Return the entries, then the entries of marks and of bands or error bars."""
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
        return [*self.handles.values(), *entries]
