"""The effect of a difference at 96 layers: size of F, gradient of x_0, ‖ΔF‖ of one SGD step."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from deepstack.base import DeepstackError
from deepstack.tools.conform.block import Block
from deepstack.tools.conform.compare import LR, copy, direction, distance, gradients
from deepstack.tools.conform.reference import Reference, draw_input
from deepstack.tools.conform.report import DEPTH
from deepstack.tools.conform.weights import Weights

DRAWS = 4  # of initial values, where the block draws its own
Measures = tuple[float, float, float]
"""‖F‖, the norm of the gradient of x_0, ‖ΔF‖ of one SGD step."""


def effect(block: Block, scheme: str, settings: Mapping[str, Any], *, copied: bool) -> str:
    """Return the block's numbers over the reference's at 96 layers, before training.

    copied: the block has the reference's initial values; else those that it draws itself, whose
        numbers are means over draws with their standard error.
    """
    try:
        reference = Reference(scheme, DEPTH, settings)
        own = block.weights(reference)
        if copied:
            copy(reference, own)
        x = draw_input(reference.config)
        with torch.no_grad():
            expected, found = reference.run(x), own.run(x)
        sizes = [(measures(own, x), measures(reference, x))]
        for seed in range(1, 1 if copied else DRAWS):
            reference = Reference(scheme, DEPTH, settings, seed=seed)
            own = block.weights(reference, seed=seed)
            sizes.append((measures(own, x), measures(reference, x)))
    except DeepstackError as error:
        return f"not measured: {error}"
    if not torch.isfinite(found).all():
        return "F is not finite"
    words = [f"‖F‖ {ratio(sizes, 0)}", f"gradient of x_0 {ratio(sizes, 1)}"]
    words.append(f"‖ΔF‖ of one SGD step {ratio(sizes, 2)}")
    if copied:
        words.insert(0, f"F differs by {100 * distance(found, expected):.3g} % of its size")
    return "; ".join(words)


def measures(weights: Weights, x: torch.Tensor) -> Measures:
    """Return ‖F‖, the norm of the gradient of x_0, and ‖ΔF‖ of an SGD step of rate 1e-3."""
    grads = gradients(weights, x)
    with torch.no_grad():
        before = weights.run(x)
        start = grads["x_0", 0]
        slope = float(start.norm()) if start is not None else 0.0
        scale = LR / direction(before)[..., 0].numel()
        for parameter in weights.module.parameters():
            if parameter.grad is not None:
                parameter.sub_(scale * parameter.grad)
        return float(before.norm()), slope, float((weights.run(x) - before).norm())


def ratio(sizes: Sequence[tuple[Measures, Measures]], index: int) -> str:
    """Return `× 1.25`, the block's number over the reference's; of several draws with its error.

    sizes: of block and reference, for each draw.
    """
    own, other = ([one[side][index] for one in sizes] for side in (0, 1))
    if not fmean(other):
        return f"{fmean(own):.3g} (reference 0)"
    found = fmean(own) / fmean(other)
    if len(sizes) == 1:
        return f"× {found:.3g}"
    spread = [
        float(torch.tensor(numbers, dtype=torch.float64).std()) / fmean(numbers)
        for numbers in (own, other)
        if fmean(numbers)
    ]
    return f"× {found:.3g} ± {found * math.hypot(*spread) / math.sqrt(len(sizes)):.1g}"
