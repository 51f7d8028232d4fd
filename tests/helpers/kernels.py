"""GPU kernels in tests: on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Triton's interpreter knows no products of bf16 numbers.
HALF = {"cpu": torch.float16, "cuda": torch.bfloat16}


def dtype_of(precision: str, device: str) -> torch.dtype:
    """Return fp32, or half precision on this device."""
    return HALF[device] if precision == "half" else torch.float32
