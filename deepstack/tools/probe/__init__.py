"""‖ΔF‖ and layer statistics of a PyTorch model that deepstack did not build.

Question: How far does a step move the function of my own model?
Asked in: docs/tutorials/own_model.md
"""

PUBLIC = {"probe": ("probe", "Probe")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
