"""Statistics of runs for charts, `compare` and reports: pandas and numpy, no matplotlib."""
