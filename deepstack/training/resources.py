"""Memory and disk that a run needs, and those that this machine has."""

import gc
import resource
import shutil
import sys

import torch

from deepstack import config as conf
from deepstack.base.errors import ResourceError
from deepstack.records import RunFolder
from deepstack.training.plan import RunPlan, memory_needed

# Upper limit of the ratio of estimated to used memory (benchmarks/memory.py).
OVERESTIMATE = 1.5


def memory_limit(device: torch.device) -> int:
    """Return the bytes a run may use: the GPU's, or the machine's within the process's limits."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return min([conf.machine_memory(), *(at for at in limits if at != resource.RLIM_INFINITY)])


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory in MB: the GPU's allocations, or the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)  # macOS counts bytes


def refuse_full_disk(plan: RunPlan, folder: RunFolder) -> None:
    """Raise ResourceError when the files of the run will not fit on the disk."""
    _, needed = plan.disk
    there = sum(path.stat().st_size for path in folder.path.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder.path).free
    if needed > free + there:
        count = conf.count_kept(plan.config.train)
        kept = f" with {count} weights of train.keep_weights" if count else ""
        raise ResourceError(
            f"{folder.path}: the run needs about {needed / 1e6:,.1f} MB on the disk while it is "
            f"trained{kept}, {(free + there) / 1e6:,.1f} MB are free; "
            "give another folder with --out"
        )


def memory_notices(plan: RunPlan) -> list[str]:
    """Return a notice if the memory may not suffice, else none.

    Raises ResourceError if the machine's memory cannot suffice.

    A machine out of memory stalls for all its users; a GPU out of memory only raises an error.
    """
    needed, here = plan.memory, memory_limit(plan.device)
    if needed <= here:
        return []
    deepest = conf.largest_size(
        plan.config, "model.depth", lambda one: memory_needed(one, plan.task) <= here
    )
    depth = f"model.depth of at most about {deepest}" if deepest else "smaller model.depth"
    short = (
        f"about {needed / 1e6:,.0f} MB of memory are needed and {here / 1e6:,.0f} MB are here; "
        f"to need less: a {depth}, a smaller train.batch_size, more train.micro_batches, or "
        "runtime.recompute_every=10"
    )
    if plan.device.type == "cpu" and needed > OVERESTIMATE * conf.machine_memory():
        raise ResourceError(short)
    return [short]


def release_memory(device: torch.device) -> None:
    """Free the memory of a closed run before the next one starts in this process."""
    gc.unfreeze()
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
