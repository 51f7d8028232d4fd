"""Statistics of runs for charts, `compare` and reports: pandas and numpy, no matplotlib."""

from deepstack.analysis.tidy import tidy

__all__ = ["tidy"]
