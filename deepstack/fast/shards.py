"""The gradients of a batch, computed in equal shards and added in order.

Each shard computes the gradients of its sequences from zero; the loss of the batch is the sum of
the shards' losses, each divided by the predicted positions of the whole batch.  An eager step runs
one shard after the other and keeps the gradients of all but the last in further tensors.  A
replayed step writes them there directly, so that threads can run the shards at the same time.
The order of all sums is fixed: the numbers depend on the count of shards, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from deepstack.fast.gpu.deferred_gradients import forget
from deepstack.gc_control import gc_paused
from deepstack.parameters.banks import Banks
from deepstack.tasks import IGNORE

Loss = Callable[..., Tensor]
"""(inputs, targets) -> mean loss, or (inputs, targets, count) -> summed loss / count."""


class Shard(NamedTuple):
    """One part of a batch.

    compute: (inputs, targets) of the whole batch -> None; computes gradients and loss of the part.
    gradients: the tensors that it fills.  copies: those to which it then copies them; none for the
    last part.
    """

    compute: Callable[[Tensor, Tensor], None]
    gradients: list[Tensor]
    copies: list[Tensor]


class ShardedBatch:
    """A loss by shards of a batch, which have equal numbers of sequences.

    loss: see `Loss`; the second form is needed from two shards on.
    """

    def __init__(self, loss: Loss, banks: Banks, count: int, device: torch.device) -> None:
        self.loss, self.banks = loss, banks
        gradients = [p.grad for bank in banks for p in bank.parameters if p.grad is not None]
        gradient_copies = [[torch.empty_like(g) for g in gradients] for _ in range(count - 1)]
        self.losses = [torch.zeros((), device=device) for _ in range(count)]
        self.shards = [
            Shard(partial(self.compute, index), gradients, copies)
            for index, copies in enumerate([*gradient_copies, []])
        ]

    def compute(self, index: int, inputs: Tensor, targets: Tensor) -> None:
        """Compute gradients and loss of one shard; only reads parameters."""
        self.banks.zero_gradients()
        with gc_paused():
            value = self.loss_of(index, inputs, targets)
            try:
                value.backward()
            except BaseException:
                forget()
                raise
        self.losses[index].copy_(value.detach())
        if copies := self.shards[index].copies:
            torch._foreach_copy_(copies, self.shards[index].gradients)

    def loss_of(self, index: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the part of the mean loss that a shard contributes."""
        count = len(self.shards)
        if count == 1:
            return self.loss(inputs, targets)
        size = len(inputs) // count
        rows = slice(index * size, (index + 1) * size)
        return self.loss(inputs[rows], targets[rows], (targets != IGNORE).sum())

    def total(self) -> Tensor:
        """Add the gradients of all shards to `.grad`, in order; return the loss of the batch."""
        *earlier, last = self.shards
        sums = [*(shard.copies for shard in earlier), last.gradients]
        for first, following in pairwise(sums):
            torch._foreach_add_(following, first)
        loss = self.losses[0].clone()
        for more in self.losses[1:]:
            loss = loss + more
        return loss
