"""A search for the best learning rates of every setting of a sweep.

Question: Which learning rate is best for each setting?  Asked in: docs/calibration.md
"""
