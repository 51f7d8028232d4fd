"""One page about runs: written, or served to a browser.

Question: What do all runs of a folder show together?  Asked in: docs/charts.md
"""

PUBLIC = {"report": ("page", "report")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
