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


def makes_kernels() -> bool:
    """Return whether Triton makes kernels here: for a GPU that it knows, or by its interpreter."""
    return has_triton() and (not torch.cuda.is_available() or since_ampere())


@cache
def since_ampere() -> bool:
    """Return whether the GPU supports flash attention and bf16 products (Ampere or later)."""
    return torch.cuda.get_device_capability() >= (8, 0)


def has_triton() -> bool:
    """Return whether torch.compile can build GPU kernels; Triton needs a C compiler."""
    has_c = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
    has_header = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
    return importlib.util.find_spec("triton") is not None and has_c and has_header


def triton_version() -> str | None:
    """Return the version of Triton, which compiles GPU kernels; None if it is unusable."""
    return metadata.version("triton") if has_triton() else None
