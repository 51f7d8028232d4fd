"""Charts: lists of runs to figures. A chart is one function; writing it registers it."""

from deepstack.base.extensions import import_extensions
from deepstack.base.registry import import_all
from deepstack.plots.calls import figure, plot
from deepstack.plots.chart import CHARTS, Chart, Options, Table, chart
from deepstack.plots.files import save
from deepstack.plots.study_charts import draw

import_all(__name__, __path__)
import_extensions("chart")

__all__ = ["CHARTS", "Chart", "Options", "Table", "chart", "draw", "figure", "plot", "save"]
