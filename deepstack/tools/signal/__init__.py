"""Variance, correlation and gradients of every layer before training."""

PUBLIC = {"signal": ("signal", "signal")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
