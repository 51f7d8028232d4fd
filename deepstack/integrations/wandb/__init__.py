"""Offline runs of Weights & Biases from finished runs."""
