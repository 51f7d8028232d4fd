"""Measurements of speed and memory: `python -m benchmarks` and one script a question."""
