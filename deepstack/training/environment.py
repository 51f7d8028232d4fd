"""Where a run takes place: device, threads, versions, git: everything its numbers may depend on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepstack import config as conf
from deepstack.errors import ResourceError

# Below this many multiplications in the largest product of a layer, a second thread costs more
# than it brings (measured on two cores; see choose_threads).
SMALL_PRODUCT = 2**27


def choose_device(runtime: conf.Runtime) -> torch.device:
    """The device of the run; 'auto' is the first GPU, or the CPU where there is none.

    Raises ResourceError when a GPU is asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if runtime.device == "cuda" and not has_gpu:
        raise ResourceError(
            "runtime.device: found cuda, but torch sees no GPU here; use runtime.device=cpu or auto"
        )
    return torch.device("cuda" if has_gpu and runtime.device != "cpu" else "cpu")


def choose_threads(config: conf.Config) -> int:
    """Number of CPU threads: what the configuration says, else 1 for small matrices.

    One thread is several times faster than two for narrow models on a busy machine.
    """
    if isinstance(config.runtime.threads, int):
        return config.runtime.threads
    tokens = config.train.batch_size * config.task.seq_len
    d_ff = config.model.d_ff or 4 * config.model.d_model
    if tokens * config.model.d_model * d_ff < SMALL_PRODUCT:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def torch_settings(config: conf.Config, device: torch.device) -> Iterator[int]:
    """Set threads and determinism for a run, and put the process back as it was afterwards."""
    threads, before = choose_threads(config), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if config.runtime.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(config.runtime.deterministic)
        # Filling fresh memory guards against reading it; the stack never does, and it costs time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        yield threads
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def environment(config: conf.Config, device: torch.device, threads: int) -> dict[str, Any]:
    """What two runs must share for their logs to be equal byte for byte."""
    return {
        "deepstack": metadata.version("deepstack"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "deterministic": config.runtime.deterministic,
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
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
