"""What a run asks of a cluster: cores, memory, a GPU; and its configuration as it is sent there."""

from __future__ import annotations

from dataclasses import dataclass

from deepstack import config as conf
from deepstack.sweeps.plan import Cell
from deepstack.training import choose_threads

# An estimate is between 0.7 and 1.5 of what is used.
MARGIN = 1.5
# What CUDA, its libraries and torch take of the host's memory beside the tensors on the GPU.
GPU_HOST_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Needs:
    """cores: a number; memory: bytes of the host; gpu_memory: bytes of one GPU, 0 without one."""

    cores: int
    memory: int
    gpu_memory: int = 0


def needs_of(cell: Cell, *, gpu: bool) -> Needs:
    """What a cell asks for; gpu: whether its run will use one where it is sent.

    On a GPU the estimate is of the GPU's memory, and the host keeps θ_0 beside what torch takes.
    """
    cores, estimate = choose_threads(cell.config), int(MARGIN * cell.memory)
    if gpu:
        return Needs(cores, GPU_HOST_BYTES + int(MARGIN * 4 * cell.parameters), estimate)
    return Needs(cores, estimate)


def as_sent(cell: Cell) -> str:
    """The cell's configuration as YAML, with the threads that it was given cores for.

    'auto' may mean all cores: of the node where it runs, and its numbers would depend on which.
    """
    threads = choose_threads(cell.config)
    if cell.config.runtime.threads == "auto" and threads > 1:
        return conf.to_yaml(conf.with_overrides(cell.config, {"runtime.threads": threads}))
    return conf.to_yaml(cell.config)
