"""The processes of a training loop: which of them measure, and which one writes the folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepstack.base import ResourceError
from deepstack.model import is_sharded


@dataclass(frozen=True)
class Processes:
    """A process among those that train one model.

    Process 0 writes the folder.  Under DistributedDataParallel it measures alone, since each
    process has the whole model.  A sharded model is measured by all processes together.

    is_first: whether this is process 0, or the only one.
    is_sharded: whether the parameters are cut over the processes.
    device: of their messages.
    """

    is_first: bool
    is_sharded: bool
    device: torch.device

    @property
    def measures(self) -> bool:
        """Return whether this process runs the model on the probe batch."""
        return self.is_first or self.is_sharded

    def mean(self, number: Tensor) -> Tensor:
        """Return the mean of a number over the processes of a sharded model."""
        if not self.is_sharded:
            return number
        total = number.detach().to(self.device, torch.float64 if number.is_cpu else torch.float32)
        total = total.clone()
        dist.all_reduce(total)
        return (total / dist.get_world_size()).to(number.dtype)

    @contextmanager
    def first_succeeds(self) -> Iterator[None]:
        """Run a block on each process of a sharded model; raise on all if it raises on process 0.

        Raises ResourceError on the others, which would otherwise wait for process 0.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        if self.is_sharded:
            flag = torch.tensor(error is not None, dtype=torch.int32, device=self.device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            if error is None and flag.item():
                error = ResourceError("another process of this loop has ended, and says why")
        if error is not None:
            raise error


def processes_of(model: nn.Module, device: torch.device) -> Processes:
    """Return this process among those that train a model.

    Several processes train it together if it is sharded, or inside of DistributedDataParallel.
    Others have a model each.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Processes(True, False, device)
    sharded = any(map(is_sharded, model.parameters()))
    wrappers = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
    rank = 0
    if sharded or wrappers:
        rank = dist.get_rank(None if sharded else wrappers[0].process_group)
    return Processes(rank == 0, sharded, device)
