"""Charts: lists of runs to figures. A chart is one function; writing it registers it."""

from deepstack.plots.chart import CHARTS, Chart, Options, Table, chart
from deepstack.plots.files import draw, figure, plot, save
from deepstack.registry import import_all

import_all(__name__, __path__)

__all__ = ["CHARTS", "Chart", "Options", "Table", "chart", "draw", "figure", "plot", "save"]
