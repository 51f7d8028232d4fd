"""One page about runs: written, watched in a terminal, served to a browser."""

PUBLIC = {"report": ("page", "report")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
