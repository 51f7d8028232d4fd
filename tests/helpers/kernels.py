"""GPU kernels in tests: on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Triton's interpreter knows no products of bf16 numbers.
HALF = {"cpu": torch.float16, "cuda": torch.bfloat16}


def dtype_of(precision: str, device: str) -> torch.dtype:
    """Return fp32, or half precision on this device."""
    return HALF[device] if precision == "half" else torch.float32


def error_of(found: Tensor, right: Tensor) -> float:
    """Return ‖y − y*‖ / ‖y*‖ in float64; infinite if a number is missing."""
    assert found.dtype is torch.float32 and found.shape == right.shape
    distance = (found.double() - right.double()).norm() / right.double().norm().clamp(min=1e-30)
    return float(distance) if bool(found.isfinite().all()) else float("inf")
