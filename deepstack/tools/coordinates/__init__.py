"""The coordinate check: sizes of outputs and of their changes over width and depth."""

PUBLIC = {
    "assert_coordinates": ("check", "assert_coordinates"),
    "coordinates": ("check", "coordinates"),
}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
