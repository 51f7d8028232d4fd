"""Snapshots: values of every layer from a separate forward and backward pass on the probe batch.

The pass runs eagerly, in evaluation mode and in fp32.  It draws no random number and changes no
gradient of training, so that training continues bit for bit as without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepstack.diagnostics.jacobian import gradient_norms, jacobian_norms
from deepstack.diagnostics.skip import losses_without
from deepstack.diagnostics.update import evaluating
from deepstack.diagnostics.watch import StackValues, free_graph, record_values, sublayer_values
from deepstack.model import Transformer
from deepstack.model.sublayers import scaled_linear
from deepstack.parameters import Bank, layer_norms
from deepstack.schemes import Scheme, visible


@dataclass
class Snapshot:
    """Values of one stack at one step; diagnostics are pure functions of it.

    sublayers: the names of a layer's S sublayers.
    schemes: the schemes of the layers;
    matrices, initial: role -> its matrix in every layer, (depth, n_out, n_in), at θ_t and at θ_0;
    scaled: whether products with them are divided by sqrt(n_in) (`model.init.distribution: ntk`).

    states: (depth + 1, batch, seq, d), the stream at every layer boundary, x_0 first; stream:
    (depth + 1, tokens), ‖x_l‖₂ of every token there.
    entering, branch, norm_input: (depth, S, tokens): ‖x‖₂ entering a sublayer, ‖G‖₂ of its output,
    ‖z‖₂ of its last norm's input; branch_variance, norm_variance: the variance of G and z over the
    d coordinates; norm_slope: max_i |g_i|/σ(z), g the norm's gain;
    alpha: (depth, S), the alpha of z = alpha x + G(x), NaN for other z;
    delta_in, delta_sum, delta_norm_in, delta_norm_out: (depth, S), the norm of the loss's gradient
    by a sublayer's input, by its residual sum, by the input and output of its last norm;
    entropy, largest_logit: sublayer -> (depth,), of its attention;
    grad_norm, param_norm, param_update_norm: (depth,), by layer; matrix_grad_norm: the gradient
    norm of the weight matrices alone; stream_grad: (depth + 1,), that of x_l, see `Boundaries`;
    jacobian: (depth + 1,), ‖∂F/∂x_l‖_F² over the numbers in F, None if not requested;
    loss: the probe loss; skip_loss: (depth,), the loss without a layer, NaN for layers not tried,
    None if not requested; initial_states: `states` at θ_0, None if not requested; gradient_noise:
    (2, depth), S and |G|² of each layer, None if not requested; shared: values that diagnostics
    share.
    """

    sublayers: tuple[str, ...]
    schemes: Sequence[Scheme]
    matrices: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
    scaled: bool
    states: Tensor
    stream: Tensor
    entering: Tensor
    branch: Tensor
    branch_variance: Tensor
    norm_input: Tensor
    norm_variance: Tensor
    norm_slope: Tensor
    alpha: Tensor
    delta_in: Tensor
    delta_sum: Tensor
    delta_norm_in: Tensor
    delta_norm_out: Tensor
    entropy: Mapping[str, Tensor]
    largest_logit: Mapping[str, Tensor]
    grad_norm: Tensor
    matrix_grad_norm: Tensor
    stream_grad: Tensor
    param_norm: Tensor
    param_update_norm: Tensor
    loss: Tensor
    skip_loss: Tensor | None = None
    initial_states: Tensor | None = None
    jacobian: Tensor | None = None
    gradient_noise: Tensor | None = None
    shared: dict[str, Any] = field(default_factory=dict)


class Pass(NamedTuple):
    """One forward and backward pass: the values of every stack, the loss, and the gradient norm of
    each parameter of the layers, in their order."""

    seen: dict[str, StackValues]
    loss: Tensor
    lengths: tuple[Tensor, ...]


def trained_by_layer(model: Transformer) -> list[list[nn.Parameter]]:
    """Return the trained parameters of every layer."""
    return [[p for p in layer.parameters() if p.requires_grad] for layer in model.layers]


def pass_through(model: Transformer, tokens: Tensor, loss: Callable[[Tensor], Tensor]) -> Pass:
    """Run the model forward and backward for a snapshot."""
    flat = [p for layer in trained_by_layer(model) for p in layer]
    with evaluating(model), record_values(model) as seen, torch.enable_grad():
        value, lengths, deltas = gradient_norms(
            model,
            tokens,
            lambda F: loss(model.head(F, model.embedding)),
            flat,
            lambda side, x: seen[side].states.append(visible(x).detach()),
        )
        free_graph(seen)
    for side, values in seen.items():
        values.deltas = deltas[side]
    return Pass(seen, value, tuple(lengths))


def stream_states(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """Return the stream at every layer boundary: side -> (depth + 1, batch, seq, d_model)."""
    states: dict[str, Tensor] = {}
    memory = None
    with torch.no_grad(), evaluating(model), model.unfused():
        for (side, stack), x0 in zip(model.stacks.items(), model.inputs(tokens), strict=True):
            streams = list(stack.stream(x0, memory))
            states[side] = torch.stack([visible(x) for x in streams])
            memory = stack.leave(streams[-1])
    return states


def take(
    model: Transformer,
    layer_banks: Sequence[Bank],
    tokens: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    before: Sequence[Tensor] | None,
    initial: Sequence[Tensor],
    skipped: int = 0,
    jacobian: bool = False,
    initial_states: Mapping[str, Tensor] | None = None,
    gradient_noise: Mapping[str, Tensor] | None = None,
) -> list[Snapshot]:
    """Take a snapshot of each stack of the model at its current parameters.

    layer_banks: the banks of the layers; loss: logits -> mean loss on the probe batch.
    before: values of these banks before the last step, None at initialisation; initial: at θ_0.
    skipped: how many layers are left out in turn, one forward pass each.  jacobian: whether to
    measure the norm of ∂F/∂x_l, one forward and one backward pass.  initial_states: those of
    `stream_states` at θ_0.  gradient_noise: side -> (2, depth), of `gradient_noise`.
    """
    seen, value, lengths = pass_through(model, tokens, loss)
    grad_norm = length_by_layer(model, lengths, lambda p: True)
    matrix_grad_norm = length_by_layer(
        model, lengths, lambda p: getattr(p, "start", "") == "matrix"
    )
    without = losses_without(model, tokens, loss, skipped) if skipped else None
    jacobians = jacobian_norms(model, tokens) if jacobian else None
    snapshots = []
    values = [bank.values() for bank in layer_banks]
    moved = [v - b for v, b in zip(values, before, strict=True)] if before else None
    first = 0
    for side, stack in model.stacks.items():
        depth, sublayers = len(stack.layers), stack.schemes[0].sublayers
        rows, first = slice(first, first + depth), first + depth
        mine = [i for i, bank in enumerate(layer_banks) if bank.stack == side]
        norms = layer_norms([values[i] for i in mine])
        changes = layer_norms([moved[i] for i in mine]) if moved else torch.zeros_like(norms)
        states = torch.stack(seen[side].states)
        feed_forward = stack.layers[0].get_submodule("feed_forward")
        by_sublayer: dict[str, Any] = sublayer_values(seen[side], depth, len(sublayers))
        seen[side].sublayers.clear()
        attention = {n: torch.stack(v) for n, v in seen[side].attention.items() if v}
        snapshots.append(
            Snapshot(
                sublayers=sublayers,
                schemes=stack.schemes,
                matrices=matrices(layer_banks, values, mine),
                initial=matrices(layer_banks, initial, mine),
                scaled=getattr(feed_forward, "linear", None) is scaled_linear,
                states=states,
                stream=states.norm(dim=-1).flatten(1),
                **by_sublayer,
                entropy={name: values[:, 0] for name, values in attention.items()},
                largest_logit={name: values[:, 1] for name, values in attention.items()},
                grad_norm=grad_norm[rows],
                matrix_grad_norm=matrix_grad_norm[rows],
                stream_grad=seen[side].deltas,
                param_norm=norms,
                param_update_norm=changes,
                loss=value,
                skip_loss=without[side] if without else None,
                initial_states=initial_states[side] if initial_states else None,
                jacobian=jacobians[side] if jacobians else None,
                gradient_noise=gradient_noise[side] if gradient_noise else None,
            )
        )
    return snapshots


def length_by_layer(
    model: Transformer, lengths: Sequence[Tensor], holds: Callable[[nn.Parameter], bool]
) -> Tensor:
    """Return the norm over each layer's trained parameters that fulfil a condition; 0 for none.

    lengths: the norm of every trained parameter of the layers, in their order.
    """
    remaining, zero = iter(lengths), torch.zeros((), device=lengths[0].device)
    rows = (
        [length for p, length in zip(layer, remaining, strict=False) if holds(p)]
        for layer in trained_by_layer(model)
    )
    return torch.stack([torch.linalg.vector_norm(torch.stack(row or [zero])) for row in rows])


def matrices(
    banks: Sequence[Bank], values: Sequence[Tensor], chosen: Sequence[int]
) -> dict[str, Tensor]:
    """Return role -> (depth, n_out, n_in) of the matrices of the chosen banks at these values."""
    result: dict[str, Tensor] = {}
    for i in chosen:
        if banks[i].start == "matrix":
            device = banks[i].parameters[0].device
            parts = values[i].to(device).chunk(len(banks[i].roles), dim=1)
            result |= dict(zip(banks[i].roles, parts, strict=True))
    return result
