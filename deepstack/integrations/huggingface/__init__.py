"""Folders of Hugging Face transformers, and data sets saved by Hugging Face datasets."""

PUBLIC = {"analyze_huggingface": ("analysis", "analyze_huggingface")}
"""Names of `import deepstack`: name -> module of this folder, attribute."""
