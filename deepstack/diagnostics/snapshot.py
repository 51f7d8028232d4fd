"""One look at every layer: a separate forward-backward on the probe batch.

It runs eagerly, in evaluation mode and in fp32, draws no random number and touches no gradient
that training uses, so that training goes on bit for bit as it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepstack.diagnostics.update import evaluating
from deepstack.model import Transformer
from deepstack.schemes import Scheme, visible
from deepstack.speed import Bank, layer_norms


@dataclass
class Snapshot:
    """What was seen of one stack at one step; diagnostics are pure functions of it.

    sublayers: the names of a layer's sublayers, of which there are S.
    stream: (depth + 1, tokens), ‖x_l‖₂ of every token at every layer boundary, x_0 first;
    entering, branch, norm_input: (depth, S, tokens): ‖x‖₂ entering a sublayer, ‖G‖₂ of its output,
    ‖z‖₂ of what its last norm reads;
    grad_norm, param_norm, param_update_norm: (depth,), by layer;
    schemes: those of the layers;
    matrices, initial: role -> its matrix in every layer, (depth, n_out, n_in), at θ_t and at θ_0.
    """

    sublayers: tuple[str, ...]
    schemes: Sequence[Scheme]
    matrices: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
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

    stream: list[Tensor] = field(default_factory=list)
    entering: list[Tensor] = field(default_factory=list)
    branch: list[Tensor] = field(default_factory=list)
    norm_input: list[Tensor] = field(default_factory=list)


def take(
    model: Transformer,
    layer_banks: Sequence[Bank],
    tokens: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    before: Sequence[Tensor] | None,
    initial: Sequence[Tensor],
) -> list[Snapshot]:
    """A snapshot of each stack of the model at its present parameters.

    layer_banks: the banks of the layers; loss: logits -> mean loss on the probe batch; before:
    values of these banks before the last step, None at initialisation; initial: at θ_0.
    """
    parameters = [[p for p in layer.parameters() if p.requires_grad] for layer in model.layers]
    with evaluating(model), watching(model) as seen, torch.enable_grad():
        memory = None
        for (side, stack), x0 in zip(model.stacks.items(), model.inputs(tokens), strict=True):
            for x in stack.stream(x0, memory):
                seen[side].stream.append(token_norm(visible(x)))
            memory = stack.leave(x)
        flat = [p for layer in parameters for p in layer]
        value = loss(model.head(memory, model.embedding))
        # A scheme may own a parameter that its wiring does not use: its gradient is zero.
        found = torch.autograd.grad(value, flat, allow_unused=True) if flat else ()
        gradients = (value.new_zeros(()) if g is None else g for g in found)
    by_layer = [
        torch.linalg.vector_norm(torch.stack(torch._foreach_norm([next(gradients) for _ in layer])))
        if layer
        else torch.zeros((), device=tokens.device)
        for layer in parameters
    ]
    snapshots = []
    values = [bank.values() for bank in layer_banks]
    moved = [v - b for v, b in zip(values, before, strict=True)] if before else None
    for side, stack in model.stacks.items():
        mine = [i for i, bank in enumerate(layer_banks) if bank.stack == side]
        norms = layer_norms([values[i] for i in mine])
        own, by_layer = by_layer[: len(stack.layers)], by_layer[len(stack.layers) :]
        boundaries = torch.stack(seen[side].stream)
        sublayers = stack.schemes[0].sublayers
        snapshots.append(
            Snapshot(
                sublayers=sublayers,
                schemes=stack.schemes,
                matrices=matrices(layer_banks, values, mine),
                initial=matrices(layer_banks, initial, mine),
                stream=boundaries,
                entering=by_sublayer(seen[side].entering, boundaries, len(sublayers)),
                branch=by_sublayer(seen[side].branch, boundaries, len(sublayers)),
                norm_input=by_sublayer(seen[side].norm_input, boundaries, len(sublayers)),
                grad_norm=torch.stack(own),
                param_norm=norms,
                param_update_norm=layer_norms([moved[i] for i in mine])
                if moved
                else torch.zeros_like(norms),
            )
        )
    return snapshots


def matrices(
    banks: Sequence[Bank], values: Sequence[Tensor], chosen: Sequence[int]
) -> dict[str, Tensor]:
    """role -> (depth, n_out, n_in), of the matrices among the chosen banks with these values."""
    found: dict[str, Tensor] = {}
    for i in chosen:
        if banks[i].start == "matrix":
            device = banks[i].parameters[0].device
            parts = values[i].to(device).chunk(len(banks[i].roles), dim=1)
            found |= dict(zip(banks[i].roles, parts, strict=True))
    return found


def token_norm(x: Tensor) -> Tensor:
    """‖x‖₂ of every token: (batch, seq, d) -> (batch * seq,)."""
    return x.detach().norm(dim=-1).flatten()


def by_sublayer(norms: list[Tensor], like: Tensor, count: int) -> Tensor:
    """A list over the sublayers of all layers in turn as (depth, count, tokens).

    NaN where a scheme has no such thing, or does not go through `residual` once a sublayer.
    like: (depth + 1, tokens).
    """
    depth, tokens = len(like) - 1, like.shape[1]
    if len(norms) != count * depth:
        return torch.full((depth, count, tokens), float("nan"), device=like.device)
    return torch.stack(norms).view(depth, count, tokens)


@contextmanager
def watching(model: Transformer) -> Iterator[dict[str, Seen]]:
    """Record what every `residual` of a stack is given, while the block runs its plain layers.

    The symbols of a scheme's equation are the arguments of its `residual`, so these are what is
    wrapped: x on entry, G(…), and what the last of the sublayer's norms reads.
    """
    seen = {side: Seen() for side in model.stacks}
    before = [layer.running for layer in model.layers]
    for layer in model.layers:
        layer.running = layer.modules_in_order()  # plain: gradients are asked for
        own = seen[layer.scheme.place.side]
        layer.scheme.residual = spy(layer.scheme, own)  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        for layer, running in zip(model.layers, before, strict=True):
            layer.running = running
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
