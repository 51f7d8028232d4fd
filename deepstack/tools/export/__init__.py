"""Weights and logs of runs in the formats of others.

Question: How does another program read these weights and logs?  Asked in: docs/runs.md
"""
