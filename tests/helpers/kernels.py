"""Kernels in tests: on a GPU, on a CPU by Triton's interpreter, of oneDNN, or compiled C++."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from deepstack.fast.native import Kernels, find_kernels
from deepstack.fast.products import onednn_is_fp32
from deepstack.fast.recording import Recording
from deepstack.fast.replay import bind_recording

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NEEDS_ONEDNN = pytest.mark.skipif(not onednn_is_fp32(), reason="oneDNN has no fp32 products here")
# Triton's interpreter knows no products of bf16 numbers.
HALF = {"cpu": torch.float16, "cuda": torch.bfloat16}


def on_devices(shapes: Sequence[Any], wide: Sequence[Any] = ()) -> list[Any]:
    """Return (device, shape) for all shapes on a CPU and on a GPU, for the wide ones on a GPU."""
    on_gpu = [pytest.param("cuda", shape, marks=pytest.mark.gpu) for shape in (*shapes, *wide)]
    return [*(("cpu", shape) for shape in shapes), *on_gpu]


def dtype_of(precision: str, device: str) -> torch.dtype:
    """Return fp32, or half precision on this device."""
    return HALF[device] if precision == "half" else torch.float32


def close(one: Tensor, two: Tensor, error: float | None = None) -> bool:
    """Return whether they are as close as sums of such numbers are, or up to this error."""
    error = error or (1e-5 if one.dtype is torch.float32 else 1e-2)
    return bool((one.double() - two.double()).norm() <= error * two.double().norm())


def error_of(found: Tensor, right: Tensor) -> float:
    """Return ‖y − y*‖ / ‖y*‖ in float64; infinite if a number is missing."""
    assert found.dtype is torch.float32 and found.shape == right.shape
    distance = (found.double() - right.double()).norm() / right.double().norm().clamp(min=1e-30)
    return float(distance) if bool(found.isfinite().all()) else float("inf")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """The C++ kernels that replay a step."""
    found = find_kernels(print)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def rerun(
    function: Callable[..., Any], inputs: list[Tensor], kernels: Kernels, threads: int = 1
) -> tuple[list[Tensor], int]:
    """Record a function, run it by kernels, and return its results and the calls of torch."""
    with torch.no_grad(), Recording() as recording:
        values = function(*inputs)
    values = list(values) if isinstance(values, (tuple, list)) else [values]
    recording.finish(values)
    bound = bind_recording(recording, kernels=kernels, threads=threads)
    bound.run()
    calls = sum(function is not kernels.run for function, _, _ in bound.operations)
    return list(bound.results), calls


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Return random tensors of these shapes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]
