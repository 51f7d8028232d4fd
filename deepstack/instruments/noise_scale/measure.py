"""The gradient noise scale: variance of the gradient between sequences, over its square."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepstack.diagnostics import Instrument, Row, RunState, Snapshot, Values, diagnostic, measuring
from deepstack.instruments.noise_scale.settings import COLUMNS
from deepstack.model import Bank, Loop, Transformer, mean_loss
from deepstack.tasks import IGNORE


class GradientNoise(NamedTuple):
    """S and |G|² of all trained parameters, and of each layer.

    model: (2,).
    by_layer: side of a stack -> (2, depth).  Double precision, on the device.
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
    loop: Loop | None = None,
) -> GradientNoise:
    """Return S and |G|² of McCandlish et al. 2018 (arXiv:1812.06162, appendix A.1).

    banks: the trained parameters.
    tokens: (B, seq), B ≥ 2.
    loss: (logits of sequence i, i) -> a loss whose mean over i is the batch's loss, so that the
        mean of its gradients g_i is ḡ.
    loop: which layers repeat the parameters of others; a repeated layer has the values of the
        parameters that it shares.

    S = Σ‖g_i − ḡ‖²/(B − 1) and |G|² = ‖ḡ‖² − S/B are unbiased.  One forward and one backward pass
    of a single sequence after the other, in evaluation mode.
    """
    B, tensors = len(tokens), [model.get_parameter(name) for bank in banks for name in bank.names]
    total, squares = [[torch.zeros(())] * len(banks) for _ in range(2)]
    for i in range(B):
        with measuring(model), torch.enable_grad():
            value = loss(model(tokens[i : i + 1]), i)
            gradients = iter(torch.autograd.grad(value, tensors, materialize_grads=True))
        for b, bank in enumerate(banks):
            rows = torch.stack([next(gradients).flatten().double() for _ in bank.names])
            if loop and bank.in_layers:
                rows = loop.sums(rows)
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
        if loop:
            parts = [loop.spread(n.T, depth).T for n in parts]
        by_layer[side] = sum(parts, nothing)
    return GradientNoise(torch.cat(noise, dim=1).sum(dim=1), by_layer)


class NoiseScale(Instrument, name="noise_scale"):
    """The noise scale of the model, and S and |G|² of the layers: (2, depth)."""

    adds = "gradient_noise"

    def measure(self, state: RunState) -> Row:
        return noise_of(state).row()

    def of_layers(self, state: RunState) -> Mapping[str, Tensor]:
        return noise_of(state).by_layer


def noise_of(state: RunState) -> GradientNoise:
    """Return S and |G|² on the probe batch, computed once a step."""
    if "gradient_noise" not in state.shared:
        targets, train = state.targets, state.config.train
        count = int((targets != IGNORE).sum()) / len(targets)

        def loss(logits: Tensor, i: int) -> Tensor:
            of_one = targets[i : i + 1]
            return mean_loss(
                logits, of_one, count, smoothing=train.label_smoothing, z_loss=train.z_loss
            )

        built = state.built
        state.shared["gradient_noise"] = gradient_noise(
            built.model, built.trained, state.inputs, loss, built.banks.loop
        )
    noise: GradientNoise = state.shared["gradient_noise"]
    return noise


@diagnostic("noise_scale", "S_l/|G_l|²", unit="sequences", parts=())
def noise_scale(snapshot: Snapshot) -> Values:
    """Gradient noise scale of each layer, S over |G|², on the probe batch (needs log.noise_scale).

    NaN where |G|² is not above 0.  The simple noise scale of McCandlish et al. 2018
    (arXiv:1812.06162): the batch size at which noise and signal of the gradient are equal.
    """
    noise = snapshot.added.get("gradient_noise")
    if noise is None:
        return {}
    variance, square = noise
    return torch.where(square > 0, variance / square, math.nan).float()


@diagnostic("gradient_variance", "S_l", parts=())
def gradient_variance(snapshot: Snapshot) -> Values:
    """Trace of the covariance of a sequence's gradient by each layer (needs log.noise_scale)."""
    noise = snapshot.added.get("gradient_noise")
    return {} if noise is None else noise[0].float()
