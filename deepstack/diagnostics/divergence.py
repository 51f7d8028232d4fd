"""Locates the first value of a step in the stack that is not finite."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepstack.diagnostics.snapshot import boundaries
from deepstack.model.build import Built
from deepstack.model.transformer import Transformer
from deepstack.schemes.scheme import visible


class Culprit(NamedTuple):
    """The first place that is not finite.

    where: one of 'embedding' (x_0 of a stack), 'forward' (output of layer `layer`; all before it
        are finite), 'head' (logits and loss alone), 'backward' (a parameter gradient of layer
        `layer`; all in layers above are finite), 'none'.
    layer: 1..N, decoder layers after encoder layers; None where the value belongs to no layer.
    """

    where: str
    layer: int | None = None


def culprit(
    built: Built, parts: Sequence[Tensor], backward: Callable[[], Tensor] | None
) -> Culprit:
    """Return the first value that is not finite: in the forward pass by depth, then backward.

    parts: the tokens of each micro-batch.
    backward: computes the gradients again and returns the loss; None checks the forward pass only.
        Waits for the device.
    """
    model = built.model
    with torch.no_grad():
        first = [layer for tokens in parts for layer in first_bad_layer(model, tokens)]
    if first:
        return Culprit("forward", min(first)) if min(first) else Culprit("embedding")
    if backward is None:
        return Culprit("none")
    if not finite(backward()):
        return Culprit("head")
    before, bad = 0, 0
    for side, stack in model.stacks.items():
        for bank in built.trained:
            if bank.stack == side:
                wrong = ~torch.isfinite(bank.gradient_rows()).all(dim=1)
                bad = max([bad, *(before + row + 1 for row in wrong.nonzero().flatten().tolist())])
        before += len(stack.layers)
    return Culprit("backward", bad) if bad else Culprit("none")


def first_bad_layer(model: Transformer, tokens: Tensor) -> list[int]:
    """Return the first layer whose output is not finite, 0 for x_0; an empty list for none."""
    memory = model.first_memory(tokens)
    for _, layer, x in boundaries(model, model.inputs(tokens), memory=memory):
        if not finite(visible(x)):
            return [layer]
    return []


def finite(values: Tensor) -> bool:
    """Return whether all values are finite."""
    return bool(torch.isfinite(values).all())
