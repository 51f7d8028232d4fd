"""Detects the abilities of this GPU, its Triton and its torch.

Modules of kernels are imported on first use, since Triton takes a second to import.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from deepstack.fast.rule import has_triton


@cache
def small_kernels() -> Any:
    """The module of kernels for small layers, or None where Triton cannot make them."""
    if not makes_kernels():
        return None
    from deepstack.fast.gpu import small_kernels

    return small_kernels


@cache
def norm_kernels() -> Any:
    """The module of kernels for norms, or None where Triton cannot make them."""
    if not makes_kernels():
        return None
    from deepstack.fast.gpu import norm_kernels

    return norm_kernels


@cache
def sum_kernels() -> Any:
    """The module of kernels that add up over tokens, or None where Triton cannot make them."""
    if not makes_kernels():
        return None
    from deepstack.fast.gpu import sum_kernels

    return sum_kernels


@cache
def split_kernels() -> Any:
    """Return the kernels for split fp32 numbers, or None except on compute capability 9."""
    if not makes_kernels() or torch.cuda.get_device_capability()[0] != 9:
        return None
    from deepstack.fast.gpu import split_attention, split_product

    return SimpleNamespace(product=split_product, attention=split_attention)


def makes_kernels() -> bool:
    """Whether Triton makes kernels here: for a GPU that it knows, or by its interpreter."""
    return has_triton() and (not torch.cuda.is_available() or since_ampere())


@cache
def since_ampere() -> bool:
    """Return whether the GPU supports flash attention and bf16 products (Ampere or later)."""
    return torch.cuda.get_device_capability() >= (8, 0)


@cache
def mixes(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this type and adds the product to one of fp32."""
    a, to = (torch.ones(16, 16, device="cuda", dtype=kind) for kind in (dtype, torch.float32))
    try:
        torch.addmm(to, a, a, out_dtype=torch.float32, out=to)
    except (RuntimeError, TypeError):
        return False
    return True


@cache
def relu_keeps_nan(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: str = "cuda"
) -> bool:
    """Whether a library's product of this size, its bias and a ReLU at once, leaves NaN NaN.

    cuBLASLt has given 0 for it; what it takes depends on the size.  This waits for the device.
    """
    sizes = (columns,), (rows, depth), (columns, depth)
    bias, x, weight = (torch.ones(size, device=device, dtype=dtype) for size in sizes)
    weight[0, 0] = float("nan")
    y = torch.ops.aten._addmm_activation(bias, x, weight.t())
    return bool(y[:, 0].isnan().all())
