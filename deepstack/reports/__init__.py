"""Results of runs: a table with one row a setting and depth, and a page with everything."""

from deepstack.analysis.comparison import compare
from deepstack.reports.page import report

__all__ = ["compare", "report"]
