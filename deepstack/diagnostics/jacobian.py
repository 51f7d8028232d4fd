"""The norm of the Jacobian of F with respect to the stream at every layer boundary."""

from collections.abc import Mapping

import torch
from torch import Tensor

from deepstack.config.instruments import SNAPSHOTS
from deepstack.diagnostics.instrument import Instrument, RunState
from deepstack.diagnostics.layers import Values, diagnostic
from deepstack.diagnostics.snapshot import Snapshot, cut_pass
from deepstack.diagnostics.update import measuring
from deepstack.model import Transformer

# Random draws for the norm of a Jacobian, over the sequences of the probe batch together.
DRAWS = 32

# Values of F for which one pass measures several draws: small passes cost their launches alone.
VALUES_AT_ONCE = 2**13


class Jacobian(Instrument, name="jacobian"):
    """Adds ‖∂F/∂x_l‖_F²/dim F and its standard error to snapshots: two (depth + 1,)."""

    every = SNAPSHOTS
    switch = "jacobian"
    adds = "jacobian"

    def of_layers(self, state: RunState) -> Mapping[str, tuple[Tensor, Tensor]]:
        return jacobian_norms(state.model, state.inputs, state.config.seed)


def norm_and_error(snapshot: Snapshot) -> tuple[Values, Values]:
    """Return the norm and its standard error for each layer, or two empty mappings."""
    both = snapshot.added.get("jacobian")
    return ({}, {}) if both is None else (both[0][1:], both[1][1:])


@diagnostic("jacobian", "‖∂F/∂x_l‖_F²/dim F", parts=())
def jacobian(snapshot: Snapshot) -> Values:
    """‖∂F/∂x_l‖_F² over the number of values in F, on the probe batch (needs log.jacobian).

    The averaged partial Jacobian norm, Doshi et al. 2021, arXiv:2111.12143, of F, which follows the
    final norm.  The mean over 32/batch random draws for each sequence, two or more; exact if a
    sequence has no more values in F (`jacobian_norms`).  It is 1 in the last layer if F = x_N.
    """
    return norm_and_error(snapshot)[0]


@diagnostic("jacobian_error", "standard error of ‖∂F/∂x_l‖_F²/dim F", parts=())
def jacobian_error(snapshot: Snapshot) -> Values:
    """Standard error of `jacobian` over its random draws; 0 where it is exact (log.jacobian)."""
    return norm_and_error(snapshot)[1]


def jacobian_norms(
    model: Transformer, tokens: Tensor, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return ‖∂F/∂x_l‖_F²/dim F and its standard error: side -> two (depth + 1,).

    tokens: (batch, seq).  F of a sequence depends on the stream of that sequence alone, so its m
        values give E‖Rᵀ J‖² = ‖J‖_F²/m for R uniform on the unit sphere.  A sequence has
        DRAWS/batch values of R, but two or more, drawn by `seed`.  The error is the standard error
        of their mean, by their deviation within each sequence.  With as many draws as values in F
        the rows of the identity take the place of R; the norm is then exact and the error 0.
    """
    batch, random = len(tokens), torch.Generator().manual_seed(seed)
    draws = max(2, DRAWS // batch)
    with measuring(model), torch.enable_grad():
        size = model.inputs(tokens[:1])[-1].numel()  # m
        exact = draws >= size
        draws = size if exact else draws
        copies = min(draws, max(1, VALUES_AT_ONCE // (batch * size)))
        F, measured, states = cut_pass(model, tokens.repeat(copies, 1))
        flat = [tensor for of_one in measured for tensor in of_one]
        squares: list[Tensor] = []  # (boundaries, copies, batch) of each backward pass
        for first in range(0, draws, copies):
            if exact:  # zeros in the place of rows beyond the last
                R = torch.eye(size)[first : first + copies, None].expand(-1, batch, -1)
                R = torch.cat([R, torch.zeros(copies - len(R), batch, size)])
            else:
                R = torch.randn(copies, batch, size, generator=random)
                R = R / R.norm(dim=-1, keepdim=True)
            R = R.reshape(F.shape).to(F)
            is_last = first + copies >= draws
            gradients = torch.autograd.grad(F, flat, R, retain_graph=not is_last, allow_unused=True)
            lengths = [by_sequence(g, copies * batch, F) for g in gradients]
            each = torch.stack(lengths).split([*map(len, measured)])
            sums = torch.stack([part.sum(dim=0) for part in each])
            squares.append(sums.unflatten(1, (copies, batch)))
    values = torch.cat(squares, dim=1)[:, :draws]  # (boundaries, draws, batch)
    means = values.mean(dim=(1, 2))
    errors = torch.zeros_like(means)
    if not exact:
        errors = (values.var(dim=1).sum(dim=1) / draws).sqrt() / batch
    depths = [*map(len, states.values())]
    both = zip(means.float().split(depths), errors.float().split(depths), strict=True)
    return dict(zip(states, both, strict=True))


def by_sequence(gradient: Tensor | None, count: int, like: Tensor) -> Tensor:
    """Return the square norm of a gradient (…, count, seq, d) for each sequence, in fp64."""
    if gradient is None:
        return like.new_zeros(count, dtype=torch.float64)
    squares = gradient.double().square().sum(dim=(-2, -1))
    return squares.reshape(-1, count).sum(dim=0)
