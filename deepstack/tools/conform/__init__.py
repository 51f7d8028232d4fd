"""A comparison of a PyTorch block with a scheme: values, gradients, start and first update."""

PUBLIC = {"conform": ("conform", "conform")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
