"""A comparison of a PyTorch block with a scheme: values, gradients, start and first update.

Question: Does my block compute what the scheme's paper says?  Asked in: docs/questions/my_block.md
"""

PUBLIC = {"conform": ("conform", "conform")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
