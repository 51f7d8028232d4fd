"""Sweeps of a user's own trainer, a command, and the answer to: is my change better?

Question: Is my change better, or is it the seed?  Asked in: docs/own_trainer.md
"""
