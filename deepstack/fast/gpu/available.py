"""Detects the abilities of this GPU, its Triton and its torch.

Modules of kernels are imported on first use, since Triton takes a second to import.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from functools import cache
from importlib import import_module, metadata
from typing import Any

import torch


@cache
def kernels(module: str) -> Any:
    """Return this module of `deepstack.fast.gpu`, or None if Triton cannot make its kernels."""
    return import_module(f"deepstack.fast.gpu.{module}") if makes_kernels() else None


@cache
def splits_fp32() -> bool:
    """Return whether kernels may split fp32 numbers: on compute capability 9."""
    return makes_kernels() and torch.cuda.get_device_capability()[0] == 9


def makes_kernels() -> bool:
    """Return whether Triton makes kernels here: for a GPU that it knows, or by its interpreter."""
    return has_triton() and (not torch.cuda.is_available() or since_ampere())


@cache
def since_ampere() -> bool:
    """Return whether the GPU supports flash attention and bf16 products (Ampere or later)."""
    return torch.cuda.get_device_capability() >= (8, 0)


@cache
def mixes(dtype: torch.dtype) -> bool:
    """Return whether torch can add a product of this type to an fp32 matrix."""
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
    """Return whether a library's kernel for product, bias and ReLU of this size keeps NaN.

    Some of cuBLASLt's kernels return 0 for it; it selects them by size.  This waits for the device.
    """
    sizes = (columns,), (rows, depth), (columns, depth)
    bias, x, weight = (torch.ones(size, device=device, dtype=dtype) for size in sizes)
    weight[0, 0] = float("nan")
    y = torch.ops.aten._addmm_activation(bias, x, weight.t())
    return bool(y[:, 0].isnan().all())


def has_triton() -> bool:
    """Return whether torch.compile can build GPU kernels; Triton needs a C compiler."""
    has_c = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
    has_header = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
    return importlib.util.find_spec("triton") is not None and has_c and has_header


def triton_version() -> str | None:
    """Return the version of Triton, which compiles GPU kernels; None if it is unusable."""
    return metadata.version("triton") if has_triton() else None
