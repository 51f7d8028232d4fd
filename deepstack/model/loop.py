"""Looped stacks: which layers share parameters, and their rows in a bank."""

from typing import NamedTuple

import torch
from torch import Tensor

from deepstack import config as conf


class Loop(NamedTuple):
    """The layers of a looped stack that share parameters.

    length: how many layers repeat, one after the other.
    before, after: layers of the prelude and of the coda, which no other layer repeats.

    Its methods take and return tensors (layers, …).
    """

    length: int
    before: int = 0
    after: int = 0

    @property
    def owners(self) -> int:
        """The layers with parameters of their own."""
        return self.before + self.length + self.after

    def once(self, rows: Tensor) -> Tensor:
        """Return the rows of the layers with parameters of their own, of all layers' rows."""
        first = rows[: self.before + self.length]
        return torch.cat([first, rows[len(rows) - self.after :]]) if self.after else first

    def sums(self, rows: Tensor) -> Tensor:
        """Return as `once` the sums over layers that share parameters, of all layers' rows."""
        end = len(rows) - self.after
        looped = rows[self.before : end]
        total = looped.view(-1, self.length, *looped.shape[1:]).sum(dim=0)
        if self.owners == self.length:
            return total
        return torch.cat([rows[: self.before], total, rows[end:]])

    def spread(self, once: Tensor, layers: int) -> Tensor:
        """Return the rows of all layers from the result of `once` or `sums`."""
        before, looped, after = once.split([self.before, self.length, self.after])
        times = (layers - self.before - self.after) // self.length
        return torch.cat([before, looped.repeat(times, *[1] * (once.ndim - 1)), after])


def loop_of(model: conf.Model) -> Loop | None:
    """Return the loop of a configuration's stacks, None if no layer repeats another one."""
    if model.unique_layers is None:
        return None
    return Loop(model.unique_layers, model.prelude_layers, model.coda_layers)
