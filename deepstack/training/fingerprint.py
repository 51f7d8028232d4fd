"""CPU model, the variables that select its kernels, and a fingerprint of their results."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# The only environment variables that a run folder records: each selects kernels or their threads.
VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_CPU_ISA_HINTS", "DNNL_DEFAULT_FPMATH_MODE", "DNNL_MAX_CPU_ISA", "GLIBC_TUNABLES",
    "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_DETERMINISTIC_REDUCTION", "KMP_FORCE_REDUCTION",
    "MKL_BLAS_COMPUTE_MODE", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DOMAIN_NUM_THREADS",
    "MKL_DYNAMIC", "MKL_ENABLE_INSTRUCTIONS", "MKL_INTERFACE_LAYER", "MKL_NUM_STRIPES",
    "MKL_NUM_THREADS", "MKL_THREADING_LAYER", "NPY_DISABLE_CPU_FEATURES", "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "OMP_SCHEDULE",
    "OMP_THREAD_LIMIT", "ONEDNN_CPU_ISA_HINTS", "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
INSTRUCTION_SETS = re.compile(r"(sse|ssse|avx|fma|f16c|amx|asimd|sve|bf16|i8mm)[a-z0-9_]*")
# (rows, inner, columns): a narrow, a usual and a wide layer; libraries choose kernels by size.
PRODUCTS = ((128, 16, 48), (128, 64, 192), (64, 256, 512))
# (sequences, heads, tokens, width of a head)
ATTENTIONS = ((4, 2, 16, 8), (2, 4, 64, 32))


def cpu(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Model and vector instruction sets of the CPU, as Linux names them."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    entries = {
        key.strip(): value.strip() for key, _, value in (text.partition(":") for text in lines)
    }
    flags = entries.get("flags", entries.get("Features", "")).split()
    return {
        "cpu_model": entries.get("model name") or platform.processor() or platform.machine(),
        "instruction_sets": " ".join(sorted(filter(INSTRUCTION_SETS.fullmatch, flags))),
    }


def bf16_support(device: torch.device, path: Path = Path("/proc/cpuinfo")) -> str:
    """Return whether products in bf16 gain or lose time on this device, in words."""
    if device.type == "cuda":
        return "faster: the GPU multiplies bf16"
    sets = cpu(path)["instruction_sets"].split()
    native = [name for name in sets if "bf16" in name]
    if native:
        return f"faster from d_model 64 on: the CPU multiplies bf16 ({', '.join(native)})"
    return "slower than fp32: the CPU has no instructions for bf16"


@torch.no_grad()
def fingerprint(device: torch.device, bf16: bool) -> str:
    """sha256 of a few products, attentions and norms on the CPU, and on the device if another.

    Leaves torch's random state alone.  bf16: whether the run multiplies in bf16 too.
    """
    digest = hashlib.sha256()
    for kind in dict.fromkeys(("cpu", device.type)):
        for result in results(torch.device(kind), bf16):
            digest.update(result.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def results(device: torch.device, bf16: bool) -> Iterator[Tensor]:
    """Yields the results of a training step's operations on fixed inputs."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(device)

    for rows, inner, columns in PRODUCTS:
        x, weight, bias = draw(rows, inner), draw(columns, inner), draw(columns)
        y = torch.addmm(bias, x, weight.t())
        yield from (y, torch.mm(y, weight), torch.mm(y.t(), x))
        yield from (torch.layer_norm(y, (columns,), bias, bias), y.norm(dim=-1), F.gelu(y))
        if bf16:
            yield torch.mm(x.bfloat16(), weight.bfloat16().t())
    for shape in ATTENTIONS:
        q, k, v = draw(*shape), draw(*shape), draw(*shape)
        yield torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)), -1), v)
        yield F.scaled_dot_product_attention(q, k, v)
        yield F.scaled_dot_product_attention(q, k, v, is_causal=True)
