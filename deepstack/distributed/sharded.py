"""Parameters sharded over the ranks (FSDP2), behind the interface of the banks.

torch's `fully_shard` cuts each parameter along its first axis, gathers a layer when it is needed
and scatters its gradient.  The optimizer receives the parts as ordinary tensors: its update is
elementwise, so a part may be updated alone, and the step stays the one that `make_step` defines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepstack.distributed.group import RankGroup
from deepstack.parameters.banks import Bank, Banks, padded_size

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class ShardedBank(Bank):
    """One parameter of every layer; this rank holds some rows of each.

    parameters: these rows, one tensor (rows, …) a layer, the storage that FSDP2 gathers from.
    held: the distributed tensors that the model has in their place.
    """

    def __init__(self, plain: Bank, held: Sequence[nn.Parameter], ranks: RankGroup) -> None:
        self.held, self.ranks = held, ranks
        rows = plain.shape[0]
        # As torch.chunk cuts: all parts equal but the last ones, which may be smaller or empty.
        self.chunk = -(-rows // ranks.size)
        start = min(ranks.rank * self.chunk, rows)
        self.mine = slice(start, min(start + self.chunk, rows))
        self.key, self.roles, self.start = plain.key, plain.roles, plain.start
        self.starts, self.stack, self.shape = plain.starts, plain.stack, plain.shape
        self.parameters = [
            nn.Parameter(local_part(p.detach()), requires_grad=p.requires_grad) for p in held
        ]

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return tensors like `parameters` joined over the ranks, (depth, padded size).

        On rank 0 the result is on the CPU; on the others it has a shape and no storage.  All ranks
        must call this.
        """
        flat = self.gathered(parts).flatten(1)
        flat = F.pad(flat, (0, padded_size(self.shape) - flat.shape[1]))
        return flat.to("cpu" if self.ranks.is_rank0 else "meta")

    def gathered(self, parts: Sequence[Tensor]) -> Tensor:
        """Return tensors like `parameters`, joined over the ranks, on each of them: (depth, …)."""
        import torch.distributed as dist

        local = parts[0].new_zeros(len(parts), self.chunk, *parts[0].shape[1:])
        for row, part in zip(local, parts, strict=True):
            row[: len(part)] = part
        gathered = [torch.empty_like(local) for _ in range(self.ranks.size)]
        dist.all_gather(gathered, local)
        return torch.cat(gathered, dim=1)[:, : self.shape[0]]

    @torch.no_grad()
    def change(self, by: Callable[[str, Tensor], None]) -> None:
        """Change whole matrices on every rank, one bank at a time, and keep this rank's rows."""
        whole = self.gathered([p.detach() for p in self.parameters])
        for role, values in zip(self.roles, whole.chunk(len(self.roles), dim=1), strict=True):
            by(role, values)
        for part, new in zip(self.parameters, whole[:, self.mine], strict=True):
            part.copy_(new)

    def parts(self, whole: Tensor) -> list[Tensor]:
        """Return this rank's parts of a result of `whole`, (depth, padded size or less)."""
        rows = whole.reshape(len(whole), -1)[:, : math.prod(self.shape)]
        return [row.view(self.shape)[self.mine] for row in rows]

    def copy_(self, values: Tensor) -> None:
        with torch.no_grad():
            for part, new in zip(self.parameters, self.parts(values), strict=True):
                part.copy_(new)

    def collect(self) -> None:
        """Move the gradients that the backward pass left with FSDP2 to `parameters`."""
        for part, held in zip(self.parameters, self.held, strict=True):
            gradient = held.grad
            held.grad = None
            # A scheme may own a parameter that its wiring does not use: its gradient is zero.
            part.grad = torch.zeros_like(part) if gradient is None else local_part(gradient)


class ShardedBanks(Banks):
    """The banks of a model whose parameters `fully_shard` has sharded.

    named: key of a bank -> its sharded parameter in every layer.
    """

    def __init__(
        self, plain: Banks, named: dict[str, list[nn.Parameter]], ranks: RankGroup
    ) -> None:
        self._count = plain.count()
        self.all = [ShardedBank(bank, named[bank.key], ranks) for bank in plain]

    def zero_gradients(self) -> None:
        """Do nothing: the backward pass creates new gradients."""

    def count(self) -> dict[str, int]:
        return self._count


def sharded_sum(banks: Sequence[Bank], ranks: RankGroup) -> Callable[[Tensor], Tensor]:
    """Return a function that collects the gradients after the backward pass and averages a loss.

    FSDP2 takes the mean of gradients over the ranks.  The loss is therefore a mean over ranks too:
    the sum over this rank's positions, divided by the mean number of positions per rank.
    """
    import torch.distributed as dist

    def share(loss: Tensor) -> Tensor:
        loss = loss / ranks.size
        dist.all_reduce(loss)
        for bank in banks:
            assert isinstance(bank, ShardedBank)
            bank.collect()
        return loss

    return share


def sharded_norm(banks: Sequence[Bank]) -> Tensor:
    """Return the norm of all gradients of these banks, by layer and then over the layers."""
    import torch.distributed as dist

    squares = []
    for bank in banks:
        gradients = [p.grad for p in bank.parameters if p.grad is not None]
        squares.append(torch.stack(torch._foreach_norm(gradients)).square())
    total = torch.cat(squares)
    dist.all_reduce(total)
    return torch.linalg.vector_norm(total.sqrt())


def local_part(tensor: Tensor) -> Tensor:
    """Return the rows of a distributed tensor that this rank holds, as a view."""
    return cast("DTensor", tensor).to_local()
