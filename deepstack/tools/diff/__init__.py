"""Two runs beside each other: settings, environment, results, and the first row that differs.

Question: Why do two runs differ?  Asked in: docs/runs.md
"""
