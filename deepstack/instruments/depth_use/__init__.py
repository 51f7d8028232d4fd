"""What each layer of a trained model contributes."""

PUBLIC = {
    "analyze": ("runs", "analyze_run"),
    "analyze_huggingface": ("external", "analyze_huggingface"),
    "analyze_model": ("external", "analyze_model"),
}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
