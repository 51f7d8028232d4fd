"""Charts: lists of runs to figures. A chart is one function; writing it registers it."""

from deepstack.base.extensions import import_extensions
from deepstack.base.registry import import_all
from deepstack.plots.arguments import AnyRuns as AnyRuns
from deepstack.plots.arguments import runs_of as runs_of
from deepstack.plots.calls import figure as figure
from deepstack.plots.calls import plot as plot
from deepstack.plots.chart import CHARTS as CHARTS
from deepstack.plots.chart import CSV_COLUMNS as CSV_COLUMNS
from deepstack.plots.chart import Chart as Chart
from deepstack.plots.chart import LineStyle as LineStyle
from deepstack.plots.chart import Options as Options
from deepstack.plots.chart import PanelRows as PanelRows
from deepstack.plots.chart import Table as Table
from deepstack.plots.chart import chart as chart
from deepstack.plots.chart import in_style as in_style
from deepstack.plots.curves import Overlay as Overlay
from deepstack.plots.curves import curve_rows as curve_rows
from deepstack.plots.curves import draw_curves as draw_curves
from deepstack.plots.curves import draw_group as draw_group
from deepstack.plots.drawing import Drawing as Drawing
from deepstack.plots.files import csv_bytes as csv_bytes
from deepstack.plots.files import render as render
from deepstack.plots.files import save as save
from deepstack.plots.group import MOST_LINES as MOST_LINES
from deepstack.plots.group import Group as Group
from deepstack.plots.layers import runs_with as runs_with
from deepstack.plots.legend import AT_CHANCE as AT_CHANCE
from deepstack.plots.legend import EDGE_RATE as EDGE_RATE
from deepstack.plots.legend import Legend as Legend
from deepstack.plots.loss import loss_label as loss_label
from deepstack.plots.loss import runs_of_rates as runs_of_rates
from deepstack.plots.outcomes import CELL_GAP as CELL_GAP
from deepstack.plots.outcomes import OUTCOME_COLOURS as OUTCOME_COLOURS
from deepstack.plots.outcomes import ROW_HEIGHT as ROW_HEIGHT
from deepstack.plots.outcomes import map_axes as map_axes
from deepstack.plots.page import Page as Page
from deepstack.plots.page import axis_label as axis_label
from deepstack.plots.panel import Panel as Panel
from deepstack.plots.panel import markers as markers
from deepstack.plots.panel import place_side_by_side as place_side_by_side
from deepstack.plots.reference import read_reference as read_reference
from deepstack.plots.study_charts import draw as draw
from deepstack.plots.study_charts import try_chart as try_chart
from deepstack.plots.style import COLOURS as COLOURS
from deepstack.plots.style import COLUMN_WIDTH as COLUMN_WIDTH
from deepstack.plots.style import DASHES as DASHES
from deepstack.plots.style import GREY as GREY
from deepstack.plots.style import MARKERS as MARKERS
from deepstack.plots.style import MORE_COLOURS as MORE_COLOURS
from deepstack.plots.style import PAGE_WIDTH as PAGE_WIDTH
from deepstack.plots.style import axis_limits as axis_limits
from deepstack.plots.style import axis_number as axis_number
from deepstack.plots.style import deepstack_style as deepstack_style
from deepstack.plots.style import depth_axis as depth_axis
from deepstack.plots.style import is_wide as is_wide
from deepstack.plots.style import log_axis as log_axis
from deepstack.plots.style import number_axis as number_axis
from deepstack.plots.style import scheme_style as scheme_style
from deepstack.plots.style import setting_style as setting_style
from deepstack.plots.style import shade as shade
from deepstack.plots.style import shades as shades
from deepstack.plots.style import step_axis as step_axis
from deepstack.plots.style import tried_axis as tried_axis
from deepstack.plots.texts import typeset as typeset
from deepstack.plots.texts import typeset_index as typeset_index
from deepstack.plots.texts import typeset_power as typeset_power
from deepstack.plots.texts import untypeset as untypeset
from deepstack.plots.tracked import heat_map_images as heat_map_images
from deepstack.plots.tracked import log_values as log_values

import_all(__name__, __path__)
import_extensions("chart")
