"""The stream from layer to layer: its size, angles, rank and gradients."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from deepstack.diagnostics.layers import diagnostic
from deepstack.diagnostics.snapshot import Snapshot
from deepstack.diagnostics.sublayer_statistics import variance

# Total number of entries of the boundaries that are converted to double precision at once.
AT_ONCE = 2**20

# The distance of tokens, 1 − cos, that rounding in fp32 can give to equal tokens.
ROUNDING = 1e-11


@diagnostic("stream_norm", "‖x_l‖", parts=())
def stream_norm(snapshot: Snapshot) -> Tensor:
    """Mean over probe tokens of ‖x_l‖₂, the stream that leaves each layer."""
    return snapshot.stream[1:].mean(dim=-1)


@diagnostic("stream_variance", "Var x_l", parts=())
def stream_variance(snapshot: Snapshot) -> Tensor:
    """Variance of x_l over the d coordinates, mean over probe tokens."""
    return in_chunks(snapshot.states[1:], lambda states: variance(states).mean(dim=(1, 2)))


@diagnostic("stream_grad", "‖∂L/∂x_l‖", parts=())
def stream_grad(snapshot: Snapshot) -> Tensor:
    """Norm of the probe loss's gradient with respect to the stream that leaves each layer.

    Of several streams all count, each with the others held fixed, but not the past values that a
    scheme keeps beside them.
    """
    return snapshot.stream_grad[1:]


@diagnostic("angular_distance", "∠(x_{l−1}, x_l)/π", parts=())
def angular_distance(snapshot: Snapshot) -> Tensor:
    """(1/π) arccos(x_{l−1}·x_l/(‖x_{l−1}‖‖x_l‖)), mean over probe tokens: how far a layer turns x.

    0: same direction, 1/2: orthogonal, 1: opposite.  Gromov et al. 2024, arXiv:2403.17887, equation
    2, take the last token of each sequence, which in a causal model has read all others.  Here
    every token counts, since an encoder has no special token.
    """

    def turns(states: Tensor) -> Tensor:
        unit = states / states.norm(dim=-1, keepdim=True)
        before, after = unit[:-1], unit[1:]
        # arccos(c) loses half of the digits near c = 1 (Kahan 2006, section 12).
        half = torch.atan2((after - before).norm(dim=-1), (after + before).norm(dim=-1))
        return half.mean(dim=(1, 2)) * (2 / math.pi)

    return in_chunks(snapshot.states, turns, overlap=1)


@diagnostic("kurtosis", "Kurt x_l", parts=())
def kurtosis(snapshot: Snapshot) -> Tensor:
    """(1/d) Σ_i ((x_i − x̄)/σ)⁴ of the d coordinates of x_l, mean over probe tokens; normal: 3.

    At most about d, where one coordinate is far larger than all others: an outlier feature.  0
    where all coordinates are equal.
    """

    def fourth_moments(states: Tensor) -> Tensor:
        squares = (states - states.mean(dim=-1, keepdim=True)).square()
        values = squares.square().mean(dim=-1) / squares.mean(dim=-1).square()
        return values.nan_to_num(nan=0.0).mean(dim=(1, 2))

    return in_chunks(snapshot.states[1:], fourth_moments)


@diagnostic("effective_rank", "erank X_l", parts=())
def effective_rank(snapshot: Snapshot) -> Tensor:
    """exp(−Σ p_i ln p_i), p_i = σ_i/Σσ, σ the singular values of the centred tokens of x_l.

    One matrix a layer: all probe tokens, (tokens, d), less their mean; at most min(tokens − 1, d).
    0 where all tokens are the same.  Roy and Vetterli 2007, 'The effective rank'.
    """

    def ranks(states: Tensor) -> Tensor:
        X = states.flatten(1, 2)
        X = X - X.mean(dim=1, keepdim=True)
        square = X @ X.mT if X.shape[1] < X.shape[2] else X.mT @ X
        sigma = torch.linalg.eigvalsh(square).clamp(min=0).sqrt()
        total = sigma.sum(dim=1)
        entropy = torch.special.entr(sigma / total[:, None]).sum(dim=1)
        return torch.where(total > 0, entropy.exp(), 0.0)

    return in_chunks(snapshot.states[1:], ranks)


@diagnostic("rank_collapse", "‖X_l − 1x̄ᵀ‖/‖X_l‖", parts=())
def rank_collapse(snapshot: Snapshot) -> Tensor:
    """‖X − 1x̄ᵀ‖_{1,∞}/‖X‖_{1,∞} of a sequence's tokens, mean over sequences: 0 where all are equal.

    X: (seq, d), x_l of one sequence; x̄ its mean over the tokens; ‖X‖_{1,∞} = sqrt(‖X‖_1 ‖X‖_∞),
    the largest sums of absolute values in a column and in a row.  Dong et al. 2021,
    arXiv:2103.03404, section 2, take the x̄ that minimises the norm of the difference.
    """

    def ratios(states: Tensor) -> Tensor:
        rest = states - states.mean(dim=2, keepdim=True)
        return (composite_norm(rest) / composite_norm(states)).mean(dim=1)

    return in_chunks(snapshot.states[1:], ratios)


@diagnostic("token_distance", "1 − cos(x_i, x_j)", parts=())
def token_distance(snapshot: Snapshot) -> Tensor:
    """1 − mean cosine between two tokens of a sequence in x_l, mean over sequences: 0 where equal.

    Below 1e-11 tokens differ by rounding in fp32, and the value is 0.  The mean cosine is the
    correlation of tokens in mean-field theory, arXiv:2403.02579.  NaN for sequences of one token.
    """

    def distances(states: Tensor) -> Tensor:
        unit = states / states.norm(dim=-1, keepdim=True)
        # The variance of the unit vectors is the mean of 1 − cos over all pairs; computed from
        # cosines it would lose digits near cos = 1.
        squares = (unit - unit.mean(dim=2, keepdim=True)).square().sum(dim=(2, 3))
        values = (squares / (unit.shape[2] - 1)).mean(dim=1)
        return torch.where(values < ROUNDING, 0.0, values)

    return in_chunks(snapshot.states[1:], distances)


def composite_norm(X: Tensor) -> Tensor:
    """Return sqrt(‖X‖_1 ‖X‖_∞) over the last two axes."""
    return (torch.linalg.matrix_norm(X, 1) * torch.linalg.matrix_norm(X, math.inf)).sqrt()


def in_chunks(states: Tensor, function: Callable[[Tensor], Tensor], overlap: int = 0) -> Tensor:
    """Apply a function to the stream at a few boundaries at a time, in double precision.

    states: (boundaries, batch, seq, d).
    overlap: number of further boundaries that a result reads. NaN where a boundary is not finite.
    """
    step = max(1, AT_ONCE // states[0].numel() - overlap)
    results = []
    for start in range(0, len(states) - overlap, step):
        part = states[start : start + step + overlap].double()
        finite = part.isfinite().flatten(1).all(dim=1)
        values = function(part.masked_fill(~finite[:, None, None, None], 0.0))
        is_known = finite.unfold(0, 1 + overlap, 1).all(dim=1)
        results.append(values.masked_fill(~is_known, torch.nan))
    return torch.cat(results).to(states.dtype)
