"""The legend of a chart with fitted exponents: one entry a line, one exponent a place."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from deepstack.analysis.fit import Fit, exponent_title
from deepstack.plots.page import Handle


@dataclass
class Exponents:
    """Fits of each line at several places (steps, panels), collected for one legend.

    A place at which no line has a fit has no column in the legend; a note names it.
    """

    styles: dict[str, dict[str, Any]] = field(default_factory=dict)
    fits: dict[str, dict[str, Fit | None]] = field(default_factory=dict)

    def add(self, line: str, place: str, fit: Fit | None, style: dict[str, Any]) -> None:
        """Add the fit of a line at a place.  style: keywords of its entry, a patch's or line's."""
        self.styles[line] = style
        self.fits.setdefault(line, {})[place] = fit

    @property
    def places(self) -> list[str]:
        return list(dict.fromkeys(place for at in self.fits.values() for place in at))

    @property
    def shown(self) -> list[str]:
        return [p for p in self.places if any(at.get(p) is not None for at in self.fits.values())]

    def handles(self) -> list[Handle]:
        """Return one entry a line: `DeepNorm: 0.43 ± 0.03, 0.41 ± 0.02`."""
        entries: list[Handle] = []
        for line, at in self.fits.items():
            numbers = ", ".join(str(at.get(place) or "–") for place in self.shown)
            label = f"{line}: {numbers}" if numbers else line
            style = self.styles[line]
            line_of: Any = partial(Line2D, [], []) if "marker" in style else Patch
            entries.append(line_of(**style, label=label))
        return entries

    def title(self) -> str | None:
        """Return the legend's title, which names the places; None without any fit."""
        if not self.shown:
            return None
        title = exponent_title([fit for at in self.fits.values() for fit in at.values()])
        return f"{title}: {', '.join(self.shown)}" if len(self.places) > 1 else title

    def notes(self) -> list[str]:
        """Return notes on the places without any fit, and on single lines without one."""
        notes = []
        if missing := [place for place in self.places if place not in self.shown]:
            few = "fewer than two points below saturation and without a diverged seed"
            notes.append(f"no exponent for {', '.join(missing)}: {few}")
        if any(at.get(place) is None for at in self.fits.values() for place in self.shown):
            notes.append("–: fewer than two points to fit")
        return notes
