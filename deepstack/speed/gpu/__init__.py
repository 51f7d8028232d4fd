"""Layers on a GPU: what stands for sublayers and norms there, and their kernels in Triton."""
