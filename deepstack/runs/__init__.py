"""Statistics of runs for charts, `compare` and reports: pandas and numpy, no matplotlib."""

from deepstack.runs.tidy import tidy

__all__ = ["tidy"]
