"""Where a run takes place: device, threads, versions, git: everything its numbers may depend on."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepstack import config as conf
from deepstack.distributed import Processes, local_rank, started_by_torchrun
from deepstack.errors import ResourceError
from deepstack.fast import fast_paths_of, parallel_of, triton_version
from deepstack.training.fingerprint import numeric_path

# Below this many multiplications in the largest product of a layer, a second thread costs more
# than it brings (measured on two cores; see choose_threads).
SMALL_PRODUCT = 2**27


ALONE = Processes()


def choose_device(runtime: conf.Runtime) -> torch.device:
    """The device of the run; 'auto' is the first GPU, or the CPU where there is none.

    Of several processes on a host that torchrun started, each takes the GPU of its number.
    Raises ResourceError when a GPU is asked for and there is none.
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
    """Whether this machine has the device that a run asks for."""
    return runtime.device != "cuda" or torch.cuda.is_available()


def memory_limit(device: torch.device) -> int:
    """Bytes that a run may take: of the GPU, the process's own limit, or the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    own = resource.getrlimit(resource.RLIMIT_DATA)[0]
    return conf.machine_memory() if own == resource.RLIM_INFINITY else own


def choose_threads(config: conf.Config, processes: Processes = ALONE) -> int:
    """Number of CPU threads: what the configuration says, else 1 for small matrices.

    One thread is several times faster than two for narrow models on a busy machine.  Processes on
    one host divide its cores among themselves.
    """
    if isinstance(config.runtime.threads, int):
        return config.runtime.threads
    tokens = config.train.batch_size * config.task.seq_len / processes.size
    if tokens * config.model.d_model * conf.width_inside(config) < SMALL_PRODUCT:
        return 1
    return max(1, cores() // processes.on_host)


def cores() -> int:
    """The processor's cores that this process may use."""
    affinity = hasattr(os, "sched_getaffinity")
    return (len(os.sched_getaffinity(0)) if affinity else os.cpu_count()) or 1


def use_deterministic(on: bool, compiling: bool) -> None:
    """Allow deterministic kernels only, or all; told to torch's compiler only where it is used,
    since importing it takes seconds."""
    if compiling:
        torch.use_deterministic_algorithms(on)
    else:
        torch.set_deterministic_debug_mode("error" if on else "default")


@contextmanager
def torch_settings(
    config: conf.Config, device: torch.device, processes: Processes = ALONE
) -> Iterator[int]:
    """Set threads and determinism for a run, and put the process back as it was afterwards."""
    threads, before = choose_threads(config, processes), torch.get_num_threads()
    compiling = device.type == "cuda" and fast_paths_of(config, device, processes).compiled
    deterministic = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic  # a module that makes its switch as it is imported
    fill = memory.fill_uninitialized_memory
    if device.type == "cuda":  # cuBLAS looks once, at its first product, whatever comes later
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.set_num_threads(threads)
        use_deterministic(config.runtime.deterministic, compiling)
        # Filling fresh memory guards against reading it; the stack never does, and it costs time.
        memory.fill_uninitialized_memory = False
        yield threads
    finally:
        torch.set_num_threads(before)
        use_deterministic(deterministic, compiling)
        memory.fill_uninitialized_memory = fill


def environment(
    config: conf.Config, device: torch.device, threads: int, processes: Processes = ALONE
) -> dict[str, Any]:
    """The environment of a run as meta.json records it: `environment_changes` compares two.

    Call it within `torch_settings`: the fingerprint depends on the number of threads.
    """
    ways = fast_paths_of(config, device, processes)
    return {
        **versions(device),
        **numeric_path(device, config.train.precision == "bf16"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "deterministic": config.runtime.deterministic,
        "processes": processes.size,
        "parallel": parallel_of(config, processes),
        **asdict(ways),
        **({"triton": triton_version()} if device.type == "cuda" and ways.fused else {}),
    }


def versions(device: torch.device) -> dict[str, str]:
    """Versions of deepstack, Python and torch, and the device."""
    return {
        "deepstack": metadata.version("deepstack"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def git_state() -> dict[str, Any]:
    """Commit and dirty flag of the checkout that deepstack runs from; empty outside of one."""
    folder = Path(__file__).resolve().parent

    def ask(*words: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    top = ask("rev-parse", "--show-toplevel")
    if top is None or Path(top) != folder.parents[1]:
        return {}
    return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}


def peak_memory_mb(device: torch.device) -> float:
    """Largest memory held so far, in MB: the GPU's allocations, or the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
