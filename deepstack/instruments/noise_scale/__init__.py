"""The gradient noise scale S/|G|², of the model and of every layer.

Question: Is the batch large enough at this depth?  Asked in: docs/runs.md
"""
