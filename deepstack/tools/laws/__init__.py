"""Power laws of the loss over depth and compute, with their intervals.

Question: How does the loss fall with depth, width, compute or loops?  Asked in: docs/compute.md
"""
