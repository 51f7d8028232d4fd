"""What runs have come to: one row a setting and depth, and a page that shows all of it."""

from deepstack.analysis.comparison import compare
from deepstack.reports.page import report

__all__ = ["compare", "report"]
