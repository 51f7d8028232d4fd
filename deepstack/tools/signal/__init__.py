"""Variance, correlation and gradients of every layer before training.

Question: Is this stack dead before it trains?  Asked in: docs/questions/dead_at_the_start.md
"""

PUBLIC = {"signal": ("signal", "signal")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
