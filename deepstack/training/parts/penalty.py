"""The spectral norm as a regulariser: a term of the gradient that reduces large norms."""

from collections.abc import Callable

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
from deepstack.fast.distributed import RankGroup
from deepstack.model.banks import Bank, joined
from deepstack.model.build import Built
from deepstack.training.plan import RunPart, RunPlan


class Penalty(RunPart):
    """A run with `train.spectral_penalty`."""

    def gradient(self, plan: RunPlan, built: Built) -> Callable[[], None]:
        return SpectralPenalty(plan.config, built, plan.ranks).add_gradient


class SpectralPenalty:
    """L + λ/2 Σ ‖W‖₂² over the trained matrices of all layers, in the gradient only.

    `__call__` returns a loss with the value of the task's loss, bit for bit: logs and divergence
    ignore the penalty.  Its gradient with respect to W has the additional term λ W v vᵀ, which the
    gradient's norm and clipping include.  The right singular vector v, by `spectral_norms`, is not
    differentiated.  For random matrices of 16 to 1024 columns the term is within 3 % of σ₁u₁v₁ᵀ on
    average.  W is the effective matrix: under the NTK parameterisation the matrix over sqrt(n_in).
    λ = 0 costs nothing.  The penalty needs whole matrices.

    Source: Yoshida and Miyato 2017, arXiv:1705.10941, section 3.  They continue from the last
    step's vector; this starts from fixed vectors, so that v is a function of the weights alone and
    a resumed run needs no further state.
    """

    def __init__(self, config: conf.Config, built: Built, ranks: RankGroup) -> None:
        # Gradients are summed over ranks, each of which has the whole penalty.
        self.strength = config.train.spectral_penalty / ranks.size
        self.scaled = config.model.init.distribution == "ntk"
        self.banks: list[Bank] = []
        if not self.strength:
            return
        self.banks = [b for b in built.trained if b.in_layers and b.start == "matrix"]
        small = {min(shape_of(bank)) for bank in self.banks}
        device = next(built.model.parameters()).device
        self.start = {n: start_vectors(n, VECTORS, device) for n in small}

    def __call__(self, loss: Tensor) -> Tensor:
        """Return the task's loss with the gradient of the penalised loss."""
        if not self.banks:
            return loss
        added = self.strength / 2 * self.squares()
        return loss + (added - added.detach())

    def add_gradient(self) -> None:
        """Add the gradient of the penalty to the gradients of the parameters."""
        if self.banks:
            (self.strength / 2 * self.squares()).backward()

    def squares(self) -> Tensor:
        """Return Σ ‖W‖₂² over the matrices, 0-d."""
        return torch.stack([self.square(bank).sum() for bank in self.banks]).sum()

    def square(self, bank: Bank) -> Tensor:
        """Return ‖W‖₂² of each matrix of a bank, (depth * roles,)."""
        n_out, n_in = shape_of(bank)
        W = tall(bank.shaped(joined(list(bank.parameters))).reshape(-1, n_out, n_in))
        with torch.no_grad():
            n = W.shape[2]
            v = top_singular_vectors(W, self.start[n], *iterations_and_squarings(n))
        square = torch.bmm(W, v).square().sum(dim=(1, 2))
        return square / n_in if self.scaled else square


def shape_of(bank: Bank) -> tuple[int, int]:
    """Return (n_out, n_in) of one matrix: a bank's roles are equal slices of its rows."""
    rows, columns = bank.shape
    return rows // len(bank.roles), columns
