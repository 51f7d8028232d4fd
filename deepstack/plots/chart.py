"""Charts: functions from runs to a figure and the table of its values."""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deepstack.base.errors import ConfigError, PluginError
from deepstack.base.registry import Registry, place_of, refuse_no_name, unknown
from deepstack.plots.style import deepstack_style
from deepstack.records import Run
from deepstack.runs.runs import Runs

# One order for every chart's CSV; columns that a chart leaves empty are not written.
CSV_COLUMNS = (
    "panel", "series", "kind", "x", "y", "low", "high", "n", "mark", "value", "exponent",
    "standard_error", "exponent_low", "exponent_high", "seeds",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Options of a chart.

    at_step: the step of the charts against depth, instead of the last one that all runs share.
    diagnostic: the per-layer diagnostic of the heat map and of the last layer against the step.
    reference: published values of this chart, columns x, y, label (and panel), or None.
    schemes: the schemes to show, in this order; all of them if empty.
    panels: the setting that makes the panels (`depth`, `scheme`, `train.lr` or a short `lr`).
    smooth: the number of steps over which curves against the step are averaged.
    x_scale, y_scale: `lin` or `log`, instead of the chart's own scales.
    rates: `best`, so that charts against the step have the best learning rate of each setting and
        depth, or `all`.
    ordered: whether lines have the order of their first runs, not of their values.
    style: `default`, or `paper` without title and settings, which go to `Chart.caption`.
    width: of the figure in inches.
    font: the name of an installed font.
    """

    at_step: int | None = None
    diagnostic: str = "grad_norm"
    reference: pd.DataFrame | None = None
    schemes: tuple[str, ...] = ()
    panels: str | None = None
    smooth: int = 1
    x_scale: str | None = None
    y_scale: str | None = None
    rates: str = "best"
    ordered: bool = False
    style: str = "default"
    width: float | None = None
    font: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("x_scale", self.x_scale), ("y_scale", self.y_scale)):
            if value not in (None, "lin", "log"):
                raise ConfigError(unknown(name, value, ("lin", "log")))
        if self.rates not in ("best", "all"):
            raise ConfigError(unknown("rates", self.rates, ("best", "all")))
        if self.style not in ("default", "paper"):
            raise ConfigError(unknown("style", self.style, ("default", "paper")))
        if self.smooth < 1:
            raise ConfigError(f"smooth: {self.smooth}; allowed 1 or more steps")
        if self.width is not None and not 2 <= self.width <= 30:
            raise ConfigError(f"width: {self.width:g}; allowed 2 to 30 inches")

    def choose(self, runs: Runs) -> Runs:
        """Return the runs of the chosen schemes, in their order; all runs if none is chosen.

        Raises ConfigError for a scheme that no run has.
        """
        if not self.schemes:
            return runs
        known = sorted({str(run.get("model.scheme")) for run in runs})
        for name in self.schemes:
            if name not in known:
                raise ConfigError(unknown("scheme of these runs", name, known))
        chosen = [run for run in runs if run.get("model.scheme") in self.schemes]
        return Runs(sorted(chosen, key=lambda run: self.schemes.index(run.get("model.scheme"))))


class LineStyle(NamedTuple):
    """How the rows of one series and kind look.

    dash: lengths of dashes and gaps in line widths, '' for a solid line, None for points without
        one.
    hollow: whether points are hollow.
    bars: whether deviations are bars and not a band.
    """

    colour: str
    dash: str | None
    hollow: bool = False
    bars: bool = False


class PanelRows(NamedTuple):
    """The rows of the table that a panel shows, by name and kinds.

    axes: index of its axes among all panels.
    styles: of each kind and series that is a line, points or a level.
    """

    name: str
    axes: int
    kinds: list[str]
    styles: dict[str, dict[str, LineStyle]]


@dataclass
class Shown:
    """The kinds of rows that a panel shows, in their order, and the style of each series."""

    kinds: dict[str, None] = field(default_factory=dict)
    styles: dict[str, dict[str, LineStyle]] = field(default_factory=dict)

    def add_style(self, kind: str, series: str, style: LineStyle) -> None:
        """Add the style of the rows of a kind and series; the first one stays."""
        self.styles.setdefault(kind, {}).setdefault(series, style)


@dataclass
class Table:
    """The rows that are drawn, collected while they are drawn.

    rows: values of each row by column.
    shown: what the panels of each axes and name show.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    shown: dict[tuple[Axes, str | None], Shown] = field(default_factory=dict)

    def add(self, **values: Any) -> None:
        """Add a row; values: of some of COLUMNS."""
        self.rows.append(values)

    def frame(self) -> pd.DataFrame:
        """Return the rows with the COLUMNS that have a value."""
        return self.chosen().dropna(axis="columns", how="all")

    def chosen(self, kinds: Sequence[str] = ()) -> pd.DataFrame:
        """Return the rows with all COLUMNS; kinds: those of the rows, by default all."""
        frame = pd.DataFrame(self.rows, columns=list(CSV_COLUMNS))
        return frame[frame["kind"].isin(kinds)] if kinds else frame

    def shown_in(self, axes: Axes, panel: str | None) -> Shown:
        """Return the contents of a panel, to which it adds."""
        return self.shown.setdefault((axes, panel), Shown())

    def panel_rows(self, axes: Sequence[Axes]) -> list[PanelRows]:
        """Return the rows that each panel shows, without levels; axes: those of the figure."""
        return [
            PanelRows(name or "", axes.index(of), kinds, shown.styles)
            for (of, name), shown in self.shown.items()
            if (kinds := [kind for kind in shown.kinds if kind not in ("level", "reference")])
        ]


@dataclass
class Chart:
    """A figure, the table of exactly the values in it, its title, and its caption as text.

    panels: the rows that each panel shows, for pages that draw the table again.
    notice: a line for the user on letters that the font lacks, or ''.
    """

    figure: Figure
    data: pd.DataFrame
    title: str
    caption: str = ""
    panels: Sequence[PanelRows] = ()
    notice: str = ""


ChartFunction = Callable[..., Chart]
CHARTS: Registry[ChartFunction] = Registry("chart")
MOST_MAIN = 5  # main charts that are drawn of the runs of one study
_MAIN: dict[str, int] = {}  # names of main charts and their places
stops_before_drawing = ContextVar("stops_before_drawing", default=False)


class DrawingBegins(BaseException):
    """Ends a chart before its first panel, where only the check of its runs is wanted."""


def begin_drawing() -> None:
    """Raise DrawingBegins if `stops_before_drawing`; a chart has checked its runs by then."""
    if stops_before_drawing.get():
        raise DrawingBegins


def in_style(function: ChartFunction, name: str | None = None) -> ChartFunction:
    """Return a function that draws the chosen runs in deepstack's style.

    name: of a registered chart, whose published values it draws.
    """

    @functools.wraps(function)
    def draw(
        runs: Iterable[Run], *words: Any, options: Options | None = None, **more: Any
    ) -> Chart:
        options = options or Options()
        if (reference := options.reference) is not None:
            options = replace(options, reference=reference[reference["chart"] == name])
        with deepstack_style(options.font):
            result = function(options.choose(Runs(runs)), *words, options=options, **more)
        if not isinstance(result, Chart):
            raise PluginError(
                f"chart {name!r}: {place_of(function)}returned {type(result).__name__}; allowed "
                "Chart(figure, data, title)"
            )
        return result

    return draw


def chart(name: str, main: int | None = None) -> Callable[[ChartFunction], ChartFunction]:
    """Register a chart: a function (runs, options) -> Chart, drawn in deepstack's style.

    It raises NothingMatchedError with a sentence when the runs do not have its values.

    main: place among the main charts; None for a chart that is drawn only by name or with all.
    """

    refuse_no_name("chart", name)

    def register(function: ChartFunction) -> ChartFunction:
        draw = in_style(function, name)
        CHARTS.register(name, draw)
        _MAIN.pop(name, None)
        if main is not None:
            _MAIN[name] = main
        return draw

    return register


def main_charts() -> list[str]:
    """Return the names of the main charts in the order of their places.

    The first MOST_MAIN that the runs of a study allow are drawn.
    """
    return sorted(_MAIN, key=lambda name: (_MAIN[name], name))
