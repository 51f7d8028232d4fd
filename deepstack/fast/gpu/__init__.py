"""Fused sublayers and norms on a GPU, and their kernels in Triton.

Triton reads a kernel's annotations as its own language: they cannot also be types, and mypy is told
so at each kernel.
"""
