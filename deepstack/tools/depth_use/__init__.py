"""Measures the contribution of each layer of a trained model.

Question: Which layers does a trained model use?  Asked in: docs/questions/which_layers.md
"""

PUBLIC = {
    "analyze": ("runs", "analyze_run"),
    "analyze_model": ("external", "analyze_model"),
}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
