"""Locates the first value of a step in the stack that is not finite."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deepstack.diagnostics.snapshot import boundaries
from deepstack.model.build import Built
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


def culprit(built: Built, tokens: Tensor, backward: Callable[[], Tensor] | None) -> Culprit:
    """Return the first value that is not finite, in the order in which a step computes them.

    backward: computes the gradients again and returns the loss; None checks the forward pass only.
        Waits for the device.
    """
    model = built.model
    with torch.no_grad():
        for _, layer, x in boundaries(model, model.inputs(tokens)):
            if not finite(visible(x)):
                return Culprit("forward", layer) if layer else Culprit("embedding")
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


def finite(values: Tensor) -> bool:
    """Return whether all values are finite."""
    return bool(torch.isfinite(values).all())
