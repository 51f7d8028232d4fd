"""‖ΔF‖ and layer statistics of a PyTorch model that deepstack did not build."""

PUBLIC = {"probe": ("probe", "Probe")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
