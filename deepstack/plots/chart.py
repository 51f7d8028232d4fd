"""Charts: functions from runs to a figure and the table of its values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from deepstack.errors import PluginError
from deepstack.records import Run
from deepstack.registry import Registry, place_of, refuse_no_name

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# One order for every chart's CSV; columns that a chart leaves empty are not written.
COLUMNS = (
    "panel", "series", "kind", "x", "y", "low", "high", "n", "mark", "value", "exponent",
    "standard_error", "seeds",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Options of a chart.

    at_step: the step of the charts against depth, instead of the last one that all runs share.
    diagnostic: the per-layer diagnostic of the heat map and of the last layer against the step.
    reference: published values of this chart, columns x, y, label (and panel), or None.
    runs: all that were given: they settle the colours, however few of them a chart can show.
    """

    at_step: int | None = None
    diagnostic: str = "grad_norm"
    reference: pd.DataFrame | None = None
    runs: tuple[Run, ...] = ()


@dataclass
class Table:
    """The rows that are drawn, collected while they are drawn."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **values: Any) -> None:
        self.rows.append(values)

    def frame(self) -> pd.DataFrame:
        import pandas as pd

        frame = pd.DataFrame(self.rows, columns=list(COLUMNS))
        return frame.dropna(axis="columns", how="all")


@dataclass
class Chart:
    """A figure, the table of exactly the values in it, and its title."""

    figure: Figure
    data: pd.DataFrame
    title: str


ChartFunction = Callable[..., Chart]
CHARTS: Registry[ChartFunction] = Registry("chart")


def chart(name: str) -> Callable[[ChartFunction], ChartFunction]:
    """Register a chart: a function (runs, options) -> Chart, drawn in deepstack's style.

    It raises NothingMatchedError with a sentence when the runs do not have its values.
    """

    refuse_no_name("chart", name)

    def register(function: ChartFunction) -> ChartFunction:
        @functools.wraps(function)
        def draw(runs: list[Run], *, options: Options | None = None) -> Chart:
            from deepstack.plots.style import paper

            options = replace(options or Options(), runs=tuple(runs))
            if (reference := options.reference) is not None:
                options = replace(options, reference=reference[reference["chart"] == name])
            with paper():
                result = function(runs, options=options)
            if not isinstance(result, Chart):
                kind = type(result).__name__
                raise PluginError(
                    f"chart {name!r}: {place_of(function)}returned {kind}; allowed "
                    "Chart(figure, data, title)"
                )
            return result

        CHARTS.register(name, draw)
        return draw

    return register
