"""Snapshots: values of every layer from separate forward and backward passes on the probe batch.

The passes run eagerly, in evaluation mode and in fp32.  They draw no random number and change no
gradient of training, so that training continues bit for bit as without them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from deepstack.diagnostics.layer_values import free_graph, record_values
from deepstack.diagnostics.sublayers import SublayerStatistics, sublayer_values
from deepstack.diagnostics.update import evaluating
from deepstack.model import Transformer
from deepstack.model.stack import Layer
from deepstack.model.sublayers import scaled_linear
from deepstack.parameters import Bank, layer_norms
from deepstack.schemes import Scheme, Stream, visible


@dataclass
class Snapshot(SublayerStatistics):
    """Values of one stack at one step; diagnostics are pure functions of it.

    S counts the sublayers of a layer; every mean, norm or variance of a token is over its d values.

    - sublayers: their S names.  schemes: those of the layers.
    - matrices, initial: role -> its matrix in every layer, (depth, n_out, n_in), at θ_t and at θ_0.
      scaled: whether products with them are divided by sqrt(n_in) (`model.init.distribution: ntk`).

    (depth + 1, …), at every layer boundary, x_0 first:

    - states: (depth + 1, batch, seq, d), the stream x_l.  initial_states: the same at θ_0.
    - stream: (depth + 1, tokens), ‖x_l‖₂.
    - stream_grad: the norm of the loss's gradient by x_l.  It counts all tensors of `cut`.
    - jacobian: ‖∂F/∂x_l‖_F² over the numbers in F.

    Every sublayer: the fields of `SublayerStatistics`.

    (depth,), of every layer:

    - entropy, largest_logit: sublayer -> those of its attention.
    - grad_norm, param_norm, param_update_norm.  matrix_grad_norm: of its weight matrices alone.
    - skip_loss: the loss without the layer.  It is NaN for layers not tried.
    - gradient_noise: (2, depth), the variance of the gradient between sequences, and |G|².

    loss: the probe loss.  shared: values that diagnostics share.  initial_states, jacobian,
    skip_loss and gradient_noise are None if the configuration does not request them.
    """

    sublayers: tuple[str, ...]
    schemes: Sequence[Scheme]
    matrices: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
    scaled: bool
    states: Tensor
    stream: Tensor
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


def boundaries(
    model: Transformer,
    inputs: Sequence[Tensor],
    replace: Callable[[Stream], Stream] = lambda stream: stream,
) -> Iterator[tuple[str, int, Stream]]:
    """Run the stacks on their inputs; yield side, layer and stream at every layer boundary.

    The layer is 0 for the x_0 of a stack; layers of a decoder are numbered after the encoder's.
    replace: returns equal values, which the next layer reads.
    """
    before, memory = 0, None
    for (side, stack), x0 in zip(model.stacks.items(), inputs, strict=True):
        x = replace(stack.enter(x0))
        yield side, 0, x
        for number, layer in enumerate(stack.layers, before + 1):
            x = replace(layer(x, memory))
            yield side, number, x
        before += len(stack.layers)
        memory = None if stack is model.last else stack.leave(x)


def stream_states(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """Return the stream at every layer boundary: side -> (depth + 1, batch, seq, d_model)."""
    states: dict[str, list[Tensor]] = {side: [] for side in model.stacks}
    with torch.no_grad(), evaluating(model), model.unfused():
        for side, _, x in boundaries(model, model.inputs(tokens)):
            states[side].append(visible(x))
    return {side: torch.stack(each) for side, each in states.items()}


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
    trained = [p for layer in model.layers for p in layer.parameters() if p.requires_grad]
    with evaluating(model), record_values(model) as seen, torch.enable_grad():
        value, lengths, stream_grad = gradient_norms(
            model,
            tokens,
            lambda F: loss(model.head(F, model.embedding)),
            trained,
            lambda side, x: seen[side].states.append(visible(x).detach()),
        )
        free_graph(seen)
    length = dict(zip(trained, lengths, strict=True))
    of_matrices = {p: n for p, n in length.items() if getattr(p, "start", "") == "matrix"}
    without = losses_without(model, tokens, loss, skipped) if skipped else None
    jacobians = jacobian_norms(model, tokens) if jacobian else None
    snapshots = []
    values = [bank.values() for bank in layer_banks]
    moved = [v - b for v, b in zip(values, before, strict=True)] if before else None
    for side, stack in model.stacks.items():
        depth, sublayers = len(stack.layers), stack.schemes[0].sublayers
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
                grad_norm=length_by_layer(stack.layers, length, value.new_zeros(())),
                matrix_grad_norm=length_by_layer(stack.layers, of_matrices, value.new_zeros(())),
                stream_grad=stream_grad[side],
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
    layers: Iterable[nn.Module], length: Mapping[nn.Parameter, Tensor], nothing: Tensor
) -> Tensor:
    """Return the norm over each layer's parameters that have a length, or `nothing`: (layers,)."""
    rows = [[length[p] for p in layer.parameters() if p in length] for layer in layers]
    return torch.stack([torch.linalg.vector_norm(torch.stack(row or [nothing])) for row in rows])


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


def cut(stream: Stream, measured: list[list[Tensor]], known: set[int]) -> Stream:
    """Return the stream at a layer boundary with views of its tensors; append these to `measured`.

    Only later layers read a view: the gradient by it leaves out its use in other tensors of the
    same boundary.  Views are made of x_l, and of those of its shape beside it in a stream of
    several.  Past values do not count: neither in a nested tuple, nor if a scheme carries them on
    unchanged.  known: the ids of all views so far, to which these are added.
    """
    x = visible(stream)
    views = {id(x): x.view_as(x)}
    for y in () if stream is x else stream[1:]:
        is_alike = isinstance(y, Tensor) and y.shape[-3:] == x.shape[-3:]
        # a stream may start at constants, which have no gradient
        if is_alike and y.requires_grad and y is not x and id(y) not in known:
            views[id(y)] = y.view_as(y)
    measured.append(list(views.values()))
    known.update(map(id, measured[-1]))
    return tree_map_only(Tensor, lambda y: views.get(id(y), y), stream)


def gradient_norms(
    model: Transformer,
    tokens: Tensor,
    of: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor] = (),
    visit: Callable[[str, Stream], None] = lambda side, x: None,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Return a function of F, and the norms of its gradient by parameters and by the stream.

    of: F -> 0-d.  The norms by the stream are side -> (depth + 1,), one for each boundary.
    visit: receives the side and x_l at each of them, in their order.
    """
    measured: list[list[Tensor]] = []  # at each boundary
    replace = partial(cut, measured=measured, known=set())
    # Detached leaves: the gradient goes down to the first sublayer and no further.
    inputs = [x0.detach().requires_grad_() for x0 in model.inputs(tokens)]
    for side, _, x in boundaries(model, inputs, replace):
        visit(side, x)
    value = of(model.last.leave(x))
    # A scheme may own a parameter that its wiring does not use: its gradient is zero.
    tensors = [*parameters, *(tensor for of_one in measured for tensor in of_one)]
    gradients = torch.autograd.grad(value, tensors, allow_unused=True)
    norms = torch._foreach_norm([value.new_zeros(1) if g is None else g for g in gradients])
    parts = torch.stack([norm.reshape(()) for norm in norms[len(parameters) :]])
    each = parts.split([len(of_one) for of_one in measured])
    by_boundary = torch.stack([torch.linalg.vector_norm(part) for part in each])
    sizes = [len(stack.layers) + 1 for stack in model.stacks.values()]
    by_side = dict(zip(model.stacks, by_boundary.split(sizes), strict=True))
    return value.detach(), list(norms[: len(parameters)]), by_side


def jacobian_norms(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """Return ‖∂F/∂x_l‖_F²/dim F at every boundary: side -> (depth + 1,).

    tokens: (batch, seq).  E‖Rᵀ J‖² = ‖J‖_F² for independent N(0, 1) in R; one fixed draw of R is
    taken, and divided by ‖R‖² in the place of dim F.
    """
    draws: list[Tensor] = []

    def product(F: Tensor) -> Tensor:
        draws.append(torch.randn(F.shape, generator=torch.Generator().manual_seed(0)).to(F.device))
        return (F * draws[0]).sum()

    with evaluating(model), torch.enable_grad(), model.unfused():
        _, _, norms = gradient_norms(model, tokens, product)
    return {side: (norm / draws[0].norm()).square() for side, norm in norms.items()}


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
