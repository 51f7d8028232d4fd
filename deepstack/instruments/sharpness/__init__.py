"""The largest eigenvalue of the loss's Hessian, plain and preconditioned.

Question: Does training reach the optimizer's edge of stability?  Asked in: docs/runs.md
"""
