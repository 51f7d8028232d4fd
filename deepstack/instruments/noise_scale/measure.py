"""The gradient noise scale: variance of the gradient between sequences, over its square."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepstack.diagnostics.layers import Values, diagnostic
from deepstack.diagnostics.snapshot import Snapshot
from deepstack.diagnostics.update import evaluating
from deepstack.model import Transformer
from deepstack.model.banks import Bank

# column -> symbol, unit, one sentence, for the run folder's columns.json
COLUMNS = {
    "model_noise_scale": (
        "S/|G|²",
        "sequences",
        "Gradient noise scale of all trained parameters, S/|G|²; NaN where |G|² is not above 0.",
    ),
    "model_gradient_variance": (
        "S",
        "",
        "Unbiased trace of the covariance of a sequence's gradient, over all trained parameters.",
    ),
    "model_gradient_square": (
        "|G|²",
        "",
        "Unbiased square of the mean gradient, ‖ḡ‖² − S/B; noise can make it negative.",
    ),
}


class GradientNoise(NamedTuple):
    """S and |G|² of all trained parameters, and of each layer.

    model: (2,).  by_layer: side of a stack -> (2, depth).  Double precision, on the device.
    """

    model: Tensor
    by_layer: dict[str, Tensor]

    def row(self) -> dict[str, float]:
        """Return the values of COLUMNS."""
        variance, square = self.model.tolist()
        scale = variance / square if square > 0 else math.nan
        return dict(zip(COLUMNS, (scale, variance, square), strict=True))


def gradient_noise(
    model: Transformer,
    banks: Sequence[Bank],
    tokens: Tensor,
    loss: Callable[[Tensor, int], Tensor],
    unique: int | None = None,
) -> GradientNoise:
    """Return S and |G|² of McCandlish et al. 2018 (arXiv:1812.06162, appendix A.1).

    banks: the trained parameters.  tokens: (B, seq), B ≥ 2.  loss: (logits of sequence i, i) -> a
    loss whose mean over i is that of the batch, so that the mean of its gradients g_i is ḡ.
    unique: the number of layers with parameters of their own, which the others repeat; a repeated
    layer has the values of the parameters that it shares.

    S = Σ‖g_i − ḡ‖²/(B − 1) and |G|² = ‖ḡ‖² − S/B are unbiased.  One forward and one backward pass
    of a single sequence after the other, in evaluation mode.
    """
    B, tensors = len(tokens), [model.get_parameter(name) for bank in banks for name in bank.names]
    total, squares = [[torch.zeros(())] * len(banks) for _ in range(2)]
    for i in range(B):
        with evaluating(model), model.unfused(), torch.enable_grad():
            value = loss(model(tokens[i : i + 1]), i)
            gradients = iter(torch.autograd.grad(value, tensors, materialize_grads=True))
        for b, bank in enumerate(banks):
            rows = torch.stack([next(gradients).flatten().double() for _ in bank.names])
            if unique and bank.in_layers:
                rows = rows.view(-1, unique, rows.shape[1]).sum(dim=0)
            total[b] = total[b] + rows
            squares[b] = squares[b] + rows.square().sum(dim=1)
    noise = []  # of each bank: (2, rows)
    for rows, square in zip(total, squares, strict=True):
        mean_square = (rows / B).square().sum(dim=1)
        variance = (square - B * mean_square) / (B - 1)
        noise.append(torch.stack([variance, mean_square - variance / B]))
    by_layer = {}
    for side, stack in model.stacks.items():
        parts = [n for bank, n in zip(banks, noise, strict=True) if bank.stack == side]
        depth = len(stack.layers)
        nothing = torch.zeros(2, depth, dtype=torch.float64, device=tokens.device)
        by_layer[side] = sum((n.repeat(1, depth // n.shape[1]) for n in parts), nothing)
    return GradientNoise(torch.cat(noise, dim=1).sum(dim=1), by_layer)


@diagnostic("noise_scale", "S_l/|G_l|²", unit="sequences", parts=())
def noise_scale(snapshot: Snapshot) -> Values:
    """Gradient noise scale of each layer, S over |G|², on the probe batch (needs log.noise_scale).

    NaN where |G|² is not above 0.  The simple noise scale of McCandlish et al. 2018
    (arXiv:1812.06162): the batch size at which noise and signal of the gradient are equal.
    """
    if snapshot.gradient_noise is None:
        return {}
    variance, square = snapshot.gradient_noise
    return torch.where(square > 0, variance / square, math.nan).float()


@diagnostic("gradient_variance", "S_l", parts=())
def gradient_variance(snapshot: Snapshot) -> Values:
    """Trace of the covariance of a sequence's gradient by each layer (needs log.noise_scale)."""
    return {} if snapshot.gradient_noise is None else snapshot.gradient_noise[0].float()
