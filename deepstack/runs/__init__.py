"""Statistics of runs for charts, `compare` and reports: pandas and numpy, no matplotlib."""

from deepstack.runs.runs import Runs
from deepstack.runs.series import Series
from deepstack.runs.tidy import tidy

__all__ = ["Runs", "Series", "tidy"]
