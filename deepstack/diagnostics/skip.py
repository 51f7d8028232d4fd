"""Contribution of a layer: the loss of the model without it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepstack.diagnostics.update import evaluating
from deepstack.model import Transformer
from deepstack.model.stack import Layer


def losses_without(
    model: Transformer, tokens: Tensor, loss: Callable[[Tensor], Tensor], count: int
) -> dict[str, Tensor]:
    """Return L with layer l replaced by the identity: side -> (depth,); see `Scheme.pass_over`.

    tokens: (batch, seq); loss: logits -> mean loss; count: how many layers are tried, one forward
    pass each, evenly spaced over all stacks; NaN for the others.  Nothing is trained in between.
    Gromov et al. 2024, arXiv:2403.17887, and Sun et al. 2025, arXiv:2502.05795, use this removal.
    """
    layers = model.layers
    losses = torch.full((len(layers),), float("nan"), device=tokens.device)
    with torch.no_grad(), evaluating(model):
        for index in divide_evenly(len(layers), count):
            losses[index] = loss(logits_without(model, tokens, layers[index]))
    sizes = [len(stack.layers) for stack in model.stacks.values()]
    return dict(zip(model.stacks, losses.split(sizes), strict=True))


def logits_without(model: Transformer, tokens: Tensor, skipped: Layer) -> Tensor:
    """Return the model's logits with one layer replaced by the identity."""
    memory = None
    for stack, x0 in zip(model.stacks.values(), model.inputs(tokens), strict=True):
        x = stack.enter(x0)
        for layer in stack.layers:
            x = layer.scheme.pass_over(x) if layer is skipped else layer(x, memory)
        memory = stack.leave(x)
    logits: Tensor = model.head(memory, model.embedding)
    return logits


def divide_evenly(total: int, count: int) -> list[int]:
    """Return `count` of 0, …, total − 1, evenly spaced with both ends; all of them if fewer."""
    if count >= total:
        return list(range(total))
    if count == 1:
        return [total - 1]
    return [round(i * (total - 1) / (count - 1)) for i in range(count)]
