"""The coordinate check: sizes of outputs and of their changes over width and depth.

Question: Which module of my model breaks µP, CompleteP or depth-µP first?
Asked in: docs/coordinates.md
"""

PUBLIC = {
    "assert_coordinates": ("check", "assert_coordinates"),
    "coordinates": ("check", "coordinates"),
}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
