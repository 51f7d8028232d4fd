"""The cores, memory and GPU that a run requires, and its configuration for another machine."""

from __future__ import annotations

from dataclasses import dataclass

from deepstack import config as conf
from deepstack.sweeps.plan import Cell
from deepstack.training import choose_threads

# An estimate is between 0.7 and 1.5 of the memory that is used.
MARGIN = 1.5
# The host memory of CUDA, its libraries and torch beside the tensors on the GPU.
GPU_HOST_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Requirements:
    """cores: a number; memory: bytes of the host; gpu_memory: bytes of one GPU, 0 without one."""

    cores: int
    memory: int
    gpu_memory: int = 0


def requirements_of(cell: Cell, *, has_gpu: bool) -> Requirements:
    """Return the requirements of a cell on a machine with or without a GPU.

    On a GPU the estimate is of the GPU's memory; the host keeps θ_0 beside the memory of torch.
    """
    cores, estimate = choose_threads(cell.config), int(MARGIN * cell.memory)
    device = cell.config.runtime.device
    if device == "cuda" or (device == "auto" and has_gpu):
        return Requirements(cores, GPU_HOST_BYTES + int(MARGIN * 4 * cell.parameters), estimate)
    return Requirements(cores, estimate)


def config_yaml(cell: Cell) -> str:
    """Return the cell's configuration as YAML, with the number of threads that it reserves.

    'auto' may mean all cores of the node, and then the numbers would depend on the node.
    """
    threads = choose_threads(cell.config)
    if cell.config.runtime.threads == "auto" and threads > 1:
        return conf.to_yaml(conf.with_overrides(cell.config, {"runtime.threads": threads}))
    return conf.to_yaml(cell.config)
