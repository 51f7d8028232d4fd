"""Whether the best learning rate stays the same over depth or width.

Question: Does the best learning rate move with depth?  Asked in: docs/questions/rate_with_depth.md
"""
