"""The spectral norm as a regulariser: a term of the gradient that pulls large norms down."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.diagnostics.spectral import (
    VECTORS,
    iterations_and_squarings,
    start_vectors,
    tall,
    top_singular_vectors,
)
from deepstack.distributed import RankGroup
from deepstack.model.build import Built
from deepstack.parameters import Bank
from deepstack.parameters.banks import joined
from deepstack.training.optimizer import refuse_parts


class SpectralPenalty:
    """L + λ/2 Σ ‖W‖₂², over the matrices of all layers that are trained, in the gradient alone.

    The loss that is logged, and that ends a run, stays the task's: the value of what `__call__`
    gives is that of what it is given, bit for bit, while its gradient by W has λ W v vᵀ besides, v
    the right singular vector, found as `spectral_norms` finds it and not differentiated: of random
    matrices of 16 to 1024 columns that is 3 % off σ₁u₁v₁ᵀ on average, or less.  So the gradient's
    norm, and its clipping, are those of both.  W is what a product does: under the NTK
    parameterisation the matrix over sqrt(n_in).  λ = 0 costs nothing.  Raises ConfigError where
    parameters are cut over processes.  Yoshida and Miyato 2017, arXiv:1705.10941, section 3; where
    theirs goes on from the last step's vector, this starts anew from fixed ones: v is a function of
    the weights alone, and nothing has to be saved for a run to go on byte for byte.
    """

    def __init__(self, config: conf.Config, built: Built, ranks: RankGroup) -> None:
        # Gradients are summed over the ranks, each of which has the whole penalty.
        self.strength = config.train.spectral_penalty / ranks.size
        self.scaled = config.model.init.distribution == "ntk"
        self.banks: list[Bank] = []
        if not self.strength:
            return
        self.banks = [b for b in built.trained if b.in_layers and b.start == "matrix"]
        for bank in self.banks:
            refuse_parts(bank, "train.spectral_penalty")
        small = {min(shape_of(bank)) for bank in self.banks}
        device = next(built.model.parameters()).device
        self.start = {n: start_vectors(n, VECTORS, device) for n in small}

    def __call__(self, loss: Tensor) -> Tensor:
        """The task's loss, whose gradient is that of the loss with the penalty."""
        if not self.banks:
            return loss
        added = self.strength / 2 * self.squares()
        return loss + (added - added.detach())

    def squares(self) -> Tensor:
        """Σ ‖W‖₂² over the matrices, 0-d."""
        return torch.stack([self.square(bank).sum() for bank in self.banks]).sum()

    def square(self, bank: Bank) -> Tensor:
        """‖W‖₂² of each matrix of a bank, (depth * roles,)."""
        n_out, n_in = shape_of(bank)
        W = bank.shaped(joined(list(bank.parameters))).reshape(-1, n_out, n_in)
        W = tall(W)
        with torch.no_grad():
            n = W.shape[2]
            v = top_singular_vectors(W, self.start[n], *iterations_and_squarings(n))
        square = torch.bmm(W, v).square().sum(dim=(1, 2))
        return square / n_in if self.scaled else square


def shape_of(bank: Bank) -> Sequence[int]:
    """(n_out, n_in) of one matrix: the roles of a bank are equal slices of its rows."""
    rows, columns = bank.shape
    return rows // len(bank.roles), columns
