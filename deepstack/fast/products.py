"""Chooses the library that multiplies fp32 matrices on a CPU: MKL or oneDNN.

Torch calls MKL, which runs AVX2 code on AMD processors.  From 1.5 million multiplications on,
oneDNN's AVX-512 kernels multiply the same fp32 numbers in half of the time.  Smaller products are
slower with them.  So each product of a fused sublayer takes the faster library by its size.  This
halves a step at 24 layers of width 256.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from deepstack.base.errors import ConfigError

Library = Literal["mkl", "onednn", "onednn_linear"]
"""onednn_linear: oneDNN by an operation that reads no setting of the process; for threads."""

# Multiplications of a product from which on oneDNN is faster.
LARGE_PRODUCT = 3 * 2**19
# Largest relative error of a product in fp32; with factors rounded to bf16 it is 2e-3.
FP32_ERROR = 1e-6


def choose_library(
    setting: Literal["auto", "mkl", "onednn"],
    largest: float,
    threads: bool = False,
    bf16: bool = False,
) -> Library:
    """Return the library for a run's products; 'auto' is oneDNN on AMD processors with AVX-512.

    largest: multiplications of the run's largest product.
    threads: whether several threads may multiply at the same time: then no setting of the process
        may select oneDNN.
    bf16: whether they multiply in bf16 too.

    Raises ConfigError if oneDNN is asked for and this torch or processor does not compute these
    products by it.
    """
    lacks_bf16 = threads and bf16 and not onednn_has_bf16()
    if setting == "onednn" and not onednn_is_fp32():
        raise ConfigError(
            "runtime.products: found onednn, which does not multiply in full fp32 precision with "
            "this torch and processor; use auto or mkl",
            key="runtime.products",
        )
    if setting == "onednn" and lacks_bf16:
        raise ConfigError(
            "runtime.products: found onednn, which has no bf16 products for shards on this "
            "processor; use auto or mkl",
            key="runtime.products",
        )
    if setting == "auto":
        is_faster = largest >= LARGE_PRODUCT and is_amd_with_avx512() and onednn_is_fp32()
        setting = "onednn" if is_faster and not lacks_bf16 else "mkl"
    return "onednn_linear" if setting == "onednn" and threads else setting


@cache
def is_amd_with_avx512(path: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor is AMD's and torch uses its AVX-512 instructions."""
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    return path.is_file() and "AuthenticAMD" in path.read_text(encoding="utf-8", errors="replace")


@cache
def onednn_is_fp32() -> bool:
    """Return whether products by oneDNN exist here and are as exact as fp32.

    The setting that selects oneDNN allows bf16.  A processor with bf16 tiles (AMX) then rounds.
    """
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.backends.mkldnn, "matmul"):
        return False
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    error = (with_onednn(torch.mm)(a, b).double() - exact).norm() / exact.norm()
    return float(error) < FP32_ERROR


def onednn_has_bf16() -> bool:
    """Return whether oneDNN has products in bf16 on this processor."""
    return bool(
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def with_onednn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs a torch function with products by oneDNN."""
    use = torch._C._set_fp32_precision_setter

    def run(*args: Any, **kwargs: Any) -> Any:
        use("mkldnn", "matmul", "bf16")
        try:
            return function(*args, **kwargs)
        finally:
            use("mkldnn", "matmul", "none")

    run.__name__ = f"{function.__name__} by oneDNN"
    return run


def use_onednn() -> None:
    """Let torch compute all later products in fp32 by oneDNN."""
    torch._C._set_fp32_precision_setter("mkldnn", "matmul", "bf16")


def uses_onednn() -> bool:
    """Return whether a product at this moment is computed by oneDNN."""
    return torch._C._get_fp32_precision_getter("mkldnn", "matmul") == "bf16"


class ProductFunctions(NamedTuple):
    """torch's functions for products, by one library."""

    mm: Callable[..., Tensor]
    addmm: Callable[..., Tensor]
    addmm_: Callable[..., Tensor]
    bmm: Callable[..., Tensor]


MKL = ProductFunctions(torch.mm, torch.addmm, Tensor.addmm_, torch.bmm)
ONEDNN = ProductFunctions(*map(with_onednn, MKL))


def linear_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, by the operation of linear layers."""
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")


def linear_addmm(bias: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Return bias + alpha a b, by the operation of linear layers."""
    if alpha != 1.0:
        return linear_mm(a, b).mul_(alpha).add_(bias)
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")


def linear_addmm_(total: Tensor, a: Tensor, b: Tensor, alpha: float = 1.0) -> Tensor:
    """Add alpha a b in place, by the operation of linear layers."""
    return total.add_(linear_mm(a, b), alpha=alpha)


BY_LIBRARY = {
    "mkl": MKL,
    "onednn": ONEDNN,
    "onednn_linear": ProductFunctions(linear_mm, linear_addmm, linear_addmm_, torch.bmm),
}


def product_functions(library: Library, multiplications: int) -> ProductFunctions:
    """Return the functions for products with so many multiplications; small ones take MKL."""
    return BY_LIBRARY[library] if multiplications >= LARGE_PRODUCT else MKL
