"""Claims about depth, each with the experiment that measures it and its verdict.

Question: Does a published statement about depth hold here, and how far does that reach?
Asked in: docs/claims.md
"""
