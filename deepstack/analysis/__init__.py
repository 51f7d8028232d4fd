"""Statistics of runs for charts, `compare` and reports: pandas and numpy, no matplotlib."""

from deepstack.analysis.fit import power_law
from deepstack.analysis.tidy import tidy

__all__ = ["power_law", "tidy"]
