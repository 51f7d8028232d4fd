"""One look at every layer: a separate forward-backward on the probe batch.

It runs eagerly, in evaluation mode and in fp32, draws no random number and touches no gradient
that training uses, so that training goes on bit for bit as it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepstack.diagnostics.update import evaluating
from deepstack.model import Encoder, Layer
from deepstack.schemes import Scheme, visible
from deepstack.speed import Bank, layer_norms


@dataclass
class Snapshot:
    """What was seen at one step; diagnostics are pure functions of it.

    stream: (depth + 1, tokens), ‖x_l‖₂ of every token at every layer boundary, x_0 first;
    entering, branch, norm_input: (depth, 2, tokens), for the attention and the feed-forward
    sublayer: ‖x‖₂ entering it, ‖G‖₂ of its output, ‖z‖₂ of what its last norm reads;
    grad_norm, param_norm, param_update_norm: (depth,), by layer.
    """

    stream: Tensor
    entering: Tensor
    branch: Tensor
    norm_input: Tensor
    grad_norm: Tensor
    param_norm: Tensor
    param_update_norm: Tensor


@dataclass
class Seen:
    """Norms by token, in the order in which the forward pass met them."""

    entering: list[Tensor] = field(default_factory=list)
    branch: list[Tensor] = field(default_factory=list)
    norm_input: list[Tensor] = field(default_factory=list)


def take(
    model: Encoder,
    layer_banks: Sequence[Bank],
    tokens: Tensor,
    loss: Callable[[Tensor], Tensor],
    before: Sequence[Tensor] | None,
) -> Snapshot:
    """A snapshot of the model at its present parameters.

    layer_banks: the banks of the layers; loss: logits -> mean loss on the probe batch; before:
    values of these banks before the last step, None at initialisation.
    """
    parameters = [[p for p in layer.parameters() if p.requires_grad] for layer in model.layers]
    with evaluating(model), watching(model) as seen, torch.enable_grad():
        stream = []
        for x in model.stream(tokens):
            stream.append(token_norm(visible(x)))
        final = model.leave(x)
        flat = [p for layer in parameters for p in layer]
        value = loss(model.head(final, model.embedding))
        # A scheme may own a parameter that its wiring does not use: its gradient is zero.
        found = torch.autograd.grad(value, flat, allow_unused=True) if flat else ()
        gradients = (value.new_zeros(()) if g is None else g for g in found)
    by_layer = (
        [
            torch.linalg.vector_norm(
                torch.stack(torch._foreach_norm([next(gradients) for _ in layer]))
            )
            for layer in parameters
        ]
        if flat
        else [torch.zeros((), device=tokens.device)] * len(parameters)
    )
    boundaries = torch.stack(stream)
    values = [bank.values() for bank in layer_banks]
    moved = [v - b for v, b in zip(values, before, strict=True)] if before else None
    norms = layer_norms(values)
    return Snapshot(
        stream=boundaries,
        entering=pairs(seen.entering, boundaries),
        branch=pairs(seen.branch, boundaries),
        norm_input=pairs(seen.norm_input, boundaries),
        grad_norm=torch.stack(by_layer),
        param_norm=norms,
        param_update_norm=layer_norms(moved) if moved else torch.zeros_like(norms),
    )


def token_norm(x: Tensor) -> Tensor:
    """‖x‖₂ of every token: (batch, seq, d) -> (batch * seq,)."""
    return x.detach().norm(dim=-1).flatten()


def pairs(norms: list[Tensor], like: Tensor) -> Tensor:
    """A list over sublayers, attention and feed-forward in turn, as (depth, 2, tokens).

    NaN where a scheme has no such thing, or does not go through `residual` twice a layer.
    like: (depth + 1, tokens).
    """
    depth, tokens = len(like) - 1, like.shape[1]
    if len(norms) != 2 * depth:
        return torch.full((depth, 2, tokens), float("nan"), device=like.device)
    return torch.stack(norms).view(depth, 2, tokens)


@contextmanager
def watching(model: Encoder) -> Iterator[Seen]:
    """Record what every `residual` of the stack is given, while the block runs its plain layers.

    The symbols of a scheme's equation are the arguments of its `residual`, so these are what is
    wrapped: x on entry, G(…), and what the last of the sublayer's norms reads.
    """
    seen = Seen()
    layers: list[Layer] = list(model.layers)  # type: ignore[arg-type]
    before = [layer.sublayers for layer in layers]
    for layer in layers:
        layer.sublayers = layer.attention, layer.feed_forward  # plain: gradients are asked for
        layer.scheme.residual = spy(layer.scheme, seen)  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        for layer, sublayers in zip(layers, before, strict=True):
            layer.sublayers = sublayers
            del layer.scheme.residual


def spy(scheme: Scheme, seen: Seen) -> Callable[..., Tensor]:
    """The scheme's own residual, which also records the norms of x, G and the norm's input."""

    def residual(
        x: Tensor, G: Callable[[Tensor], Tensor], *norms: Callable[[Tensor], Tensor], **more: Any
    ) -> Tensor:
        def branch(y: Tensor) -> Tensor:
            out = G(y)
            seen.branch.append(token_norm(out))
            return out

        def last_norm(z: Tensor) -> Tensor:
            seen.norm_input.append(token_norm(z))
            return norms[-1](z)

        seen.entering.append(token_norm(x))
        watched = (*norms[:-1], last_norm) if norms else ()
        return type(scheme).residual(scheme, x, branch, *watched, **more)

    return residual
