"""The environment of a run: device, threads, versions, git, torch's settings, and a fingerprint."""

import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import deepstack
from deepstack import config as conf
from deepstack.base.errors import ResourceError
from deepstack.fast import FastPaths, triton_version
from deepstack.fast.distributed import (
    ALONE,
    RankGroup,
    local_rank,
    started_by_torchrun,
)
from deepstack.training.plan import RunPlan
from deepstack.training.threads import thread_rule


def choose_device(runtime: conf.Runtime) -> torch.device:
    """Return the device of the run; 'auto' is the first GPU, or the CPU without one.

    Each rank takes the GPU with its number on the host.  Raises ResourceError if the GPU that is
    asked for does not exist.
    """
    has_gpu = torch.cuda.is_available()
    if runtime.device == "cuda" and not has_gpu:
        raise ResourceError(
            "runtime.device: found cuda, but torch sees no GPU here; use runtime.device=cpu or auto"
        )
    if not has_gpu or runtime.device == "cpu":
        return torch.device("cpu")
    number, there = local_rank(), torch.cuda.device_count()
    if number >= there:
        raise ResourceError(
            f"process {number} of this host has no GPU: torch sees {there}; "
            f"use torchrun --nproc-per-node={there} or runtime.device=cpu"
        )
    if number:
        torch.cuda.set_device(number)
    return torch.device("cuda", number) if started_by_torchrun() else torch.device("cuda")


def device_is_here(runtime: conf.Runtime) -> bool:
    """Return whether this machine has the device that a run asks for."""
    return runtime.device != "cuda" or torch.cuda.is_available()


def use_deterministic(on: bool, device: torch.device) -> None:
    """Allow deterministic kernels only, or all.

    torch's compiler has its own flag, which fast paths of a GPU use.  Importing it takes seconds,
    so it is set only after the compiler has been imported.
    """
    if device.type == "cuda" and "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(on)
    else:
        torch.set_deterministic_debug_mode("error" if on else "default")


@contextmanager
def torch_settings(
    config: conf.Config, device: torch.device, ranks: RankGroup = ALONE
) -> Iterator[int]:
    """Set threads and determinism for a run, yield its threads, and restore both afterwards."""
    on_gpu = device.type == "cuda"
    rule, before = thread_rule(config, ranks, on_gpu=on_gpu), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic  # a module whose setting is created at import
    fill = memory.fill_uninitialized_memory
    if on_gpu:  # cuBLAS reads it once, at its first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats(device)  # the peak of this run, not of an earlier one
    try:
        torch.set_num_threads(rule.of_operation())
        use_deterministic(config.runtime.deterministic, device)
        # Filling fresh memory guards against reading it; the stack never does, and it costs time.
        memory.fill_uninitialized_memory = False
        yield rule.reserved
    finally:
        torch.set_num_threads(before)
        use_deterministic(deterministic, device)
        memory.fill_uninitialized_memory = fill


@contextmanager
def usual_torch_modes() -> Iterator[None]:
    """Use torch's defaults that training needs, whatever a notebook has set; restore them.

    These are gradients, no inference mode, no autocast, float32 and the CPU as the default device.
    """
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        yield


def environment_of(plan: RunPlan, paths: FastPaths) -> dict[str, Any]:
    """Return the environment of a run as meta.json records it: `environment_changes` compares two.

    paths: the fast paths of the run.

    Call it within `torch_settings`: the fingerprint depends on the number of threads.
    """
    config, device = plan.config, plan.device
    on_gpu = device.type == "cuda"
    without = {"recompute_every"}  # the same numbers
    without |= {name for name in ("products", "executor") if getattr(paths, name) in ("mkl", "")}
    return {
        **versions(device),
        **cpu(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "fingerprint": fingerprint(device, config.train.precision == "bf16"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": plan.threads.of_operation(paths),
        "deterministic": config.runtime.deterministic,
        "processes": plan.ranks.size,
        "parallel": plan.parallel,
        **{name: value for name, value in asdict(paths).items() if name not in without},
        **({"triton": triton_version()} if on_gpu and paths.fused else {}),
    }


def environment_changes(known: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return every difference between two environments, as 'torch was …, is …'.

    CPU and variables only explain a different fingerprint.  An environment recorded without a
    fingerprint is compared without it.
    """
    names = {*known, *now}
    same_numbers = "fingerprint" not in known or known["fingerprint"] == now.get("fingerprint")
    if same_numbers:
        names -= {"fingerprint", "cpu_model", "instruction_sets", "variables"}
    changes = [
        f"{name} was {known.get(name)!r}, is {now.get(name)!r}"
        for name in sorted(names)
        if known.get(name) != now.get(name)
    ]
    if not same_numbers and known.get("cpu_model") == now.get("cpu_model"):
        changes.append(f"cpu_model is {now.get('cpu_model')!r}")
    return changes


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions of deepstack, Python and torch, and the device."""
    return {
        "deepstack": deepstack.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


SOURCE = Path(__file__).resolve().parents[2]


def git_state(folder: Path = SOURCE) -> dict[str, Any]:
    """Return commit and dirty flag of deepstack's own checkout; empty outside of one.

    Variables such as GIT_DIR, which a hook sets, name another repository: git does not see them.
    git answers for a checkout of another owner too, as in a container: Python runs its code anyway.
    """
    variables = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}

    def ask(*words: str) -> str:
        command = ["git", "-c", f"safe.directory={folder}", "-C", str(folder), *words]
        # not text=True, which decodes by the locale: a path need not be in its letters
        answer = subprocess.run(command, capture_output=True, timeout=10, check=True, env=variables)
        return os.fsdecode(answer.stdout).strip()

    try:
        top, commit = ask("rev-parse", "--show-toplevel", "HEAD").split("\n")
        if Path(top) != folder:
            return {}
        return {"commit": commit, "dirty": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}


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
CPU_INFO = Path("/proc/cpuinfo")
INSTRUCTION_SETS = re.compile(r"(sse|ssse|avx|fma|f16c|amx|asimd|sve|bf16|i8mm)[a-z0-9_]*")
# (rows, inner, columns): a narrow, a usual and a wide layer; libraries choose kernels by size.
PRODUCTS = ((128, 16, 48), (128, 64, 192), (64, 256, 512))
# (sequences, heads, tokens, width of a head)
ATTENTIONS = ((4, 2, 16, 8), (2, 4, 64, 32))


def cpu() -> dict[str, str]:
    """Model and vector instruction sets of the CPU, as Linux names them."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
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


def bf16_support(device: torch.device) -> str:
    """Return whether products in bf16 gain or lose time on this device, in words."""
    if device.type == "cuda":
        return "faster: the GPU multiplies bf16"
    sets = cpu()["instruction_sets"].split()
    native = [name for name in sets if "bf16" in name]
    if native:
        return f"faster from d_model 128 on: the CPU multiplies bf16 ({', '.join(native)})"
    return "slower than fp32: the CPU has no instructions for bf16"


@torch.no_grad()
def fingerprint(device: torch.device, bf16: bool) -> str:
    """sha256 of a few products, attentions and norms on the CPU, and on the device if another.

    Leaves torch's random state alone.

    bf16: whether the run multiplies in bf16 too.
    """
    digest = hashlib.sha256()
    for kind in dict.fromkeys(("cpu", device.type)):
        for result in fixed_operations(torch.device(kind), bf16):
            digest.update(result.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def fixed_operations(device: torch.device, bf16: bool) -> Iterator[Tensor]:
    """Yield the results of a training step's operations on fixed inputs."""
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
