"""Snapshots: values of every layer from separate forward and backward passes on the probe batch.

The passes run in evaluation mode and in fp32, as plain modules except in `losses_without`, which
uses the model's fused sublayers.  They draw no random number and change no gradient of training,
so that training continues bit for bit as without them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deepstack.diagnostics.sublayers import SublayerStatistics, record_values
from deepstack.diagnostics.update import evaluating
from deepstack.model import Transformer
from deepstack.model.banks import Bank, layer_norms
from deepstack.model.stack import Layer, Layers
from deepstack.model.sublayers import scaled_linear
from deepstack.schemes import Scheme, Stream, visible

# Random draws for the norm of a Jacobian, over the sequences of the probe batch together.
DRAWS = 32

# Values of F for which one pass measures several draws: small passes cost their launches alone.
VALUES_AT_ONCE = 2**13


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
    - jacobian: ‖∂F/∂x_l‖_F² over the numbers in F, and the standard error of this estimate.

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
    jacobian: tuple[Tensor, Tensor] | None = None
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
    memory, number = None, 0
    for (side, stack), x in zip(model.stacks.items(), inputs, strict=True):
        stream = replace(stack.enter(x))
        yield side, 0, stream
        for layer in stack.layers:
            number += 1
            stream = replace(layer(stream, memory))
            yield side, number, stream
        memory = None if stack is model.last else stack.leave(stream)


@torch.no_grad()
def stream_states(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """Return the stream at every layer boundary: side -> (depth + 1, batch, seq, d_model)."""
    states: dict[str, list[Tensor]] = {side: [] for side in model.stacks}
    with evaluating(model), model.unfused():
        for side, _, stream in boundaries(model, model.inputs(tokens)):
            states[side].append(visible(stream))
    return {side: torch.stack(values) for side, values in states.items()}


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
    seed: int = 0,
    initial_states: Mapping[str, Tensor] | None = None,
    gradient_noise: Mapping[str, Tensor] | None = None,
) -> list[Snapshot]:
    """Take a snapshot of each stack of the model at its current parameters.

    layer_banks: the banks of the layers; loss: logits -> mean loss on the probe batch.
    before: values of these banks before the last step, None at initialisation; initial: at θ_0.
    skipped: how many layers are left out in turn, one forward pass each.  jacobian: whether to
    measure the norm of ∂F/∂x_l, see `jacobian_norms`; seed: of its draws.  initial_states: those
    of `stream_states` at θ_0.  gradient_noise: side -> (2, depth), of `gradient_noise`.
    """
    trained = [p for layer in model.layers for p in layer.parameters() if p.requires_grad]
    with evaluating(model), torch.enable_grad(), record_values(model) as recorded:
        value, lengths, stream_grad, streams = gradient_norms(
            model, tokens, lambda F: loss(model.head(F, model.embedding)), trained
        )
        for tap in reversed(recorded.values()):
            tap.free_graph()
    jacobians = jacobian_norms(model, tokens, seed) if jacobian else {}
    losses = losses_without(model, tokens, loss, skipped) if skipped else {}
    snapshots = []
    for side, stack in model.stacks.items():
        depth, names = len(stack.layers), stack.schemes[0].sublayers
        states = torch.stack(streams[side])
        chosen = [index for index, bank in enumerate(layer_banks) if bank.stack == side]
        banks = [layer_banks[index] for index in chosen]
        values = [bank.values() for bank in banks]
        earlier = values if before is None else [before[index] for index in chosen]
        starts = [initial[index].to(tokens.device) for index in chosen]
        # All layers of a stack have the same parameters.
        of_layer = [p for p in stack.layers[0].parameters() if p.requires_grad]
        is_matrix = [getattr(p, "start", "") == "matrix" for p in of_layer]
        of_stack, lengths = lengths.tensor_split([depth * len(is_matrix)])
        gradients = of_stack.view(depth, len(is_matrix))
        by_sublayer: dict[str, Any] = recorded[side].statistics(depth, len(names), states[0])
        attention = {name: torch.stack(v) for name, v in recorded[side].attention.items() if v}
        snapshots.append(
            Snapshot(
                **by_sublayer,
                sublayers=names,
                schemes=stack.schemes,
                matrices=matrices(banks, values),
                initial=matrices(banks, starts),
                scaled=model.layers[0].modules_in_order()[-1].linear is scaled_linear,
                states=states,
                stream=states.norm(dim=-1).flatten(1),
                entropy={name: two[:, 0] for name, two in attention.items()},
                largest_logit={name: two[:, 1] for name, two in attention.items()},
                grad_norm=gradients.norm(dim=1),
                matrix_grad_norm=gradients[:, is_matrix].norm(dim=1),
                stream_grad=stream_grad[side],
                param_norm=layer_norms(values),
                param_update_norm=layer_norms(
                    [a - b for a, b in zip(values, earlier, strict=True)]
                ),
                loss=value,
                skip_loss=losses.get(side),
                initial_states=initial_states[side] if initial_states else None,
                jacobian=jacobians.get(side),  # the norm and its standard error
                gradient_noise=gradient_noise[side] if gradient_noise else None,
            )
        )
    return snapshots


def matrices(banks: Sequence[Bank], values: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return role -> (depth, n_out, n_in) of the matrices of the banks at these values."""
    return {
        role: matrix
        for bank, value in zip(banks, values, strict=True)
        if bank.start == "matrix"
        for role, matrix in zip(bank.roles, value.chunk(len(bank.roles), dim=1), strict=True)
    }


def gradient_norms(
    model: Transformer,
    tokens: Tensor,
    of: Callable[[Tensor], Tensor],
    parameters: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, list[Tensor]]]:
    """Return a function of F, the norms of its gradient by parameters and stream, and the stream.

    of: F -> 0-d.  The norms by the stream are side -> (depth + 1,), one for each boundary; the
    stream is side -> x_l at each of them.
    """
    F, measured, states = cut_pass(model, tokens)
    value = of(F)
    tensors = [*parameters, *(tensor for of_one in measured for tensor in of_one)]
    # A scheme may own a parameter that its layers do not use; its gradient is 0.
    gradients = torch.autograd.grad(value, tensors, allow_unused=True)
    nothing = value.new_zeros(1)
    norms = torch._foreach_norm([nothing if g is None else g for g in gradients])
    lengths = torch.stack([norm.reshape(()) for norm in norms])
    by_parameter, *each = lengths.split([len(parameters), *map(len, measured)])
    by_boundary = torch.stack([torch.linalg.vector_norm(part) for part in each])
    by_side = dict(zip(states, by_boundary.split([*map(len, states.values())]), strict=True))
    return value.detach(), by_parameter, by_side, states


def cut_pass(
    model: Transformer, tokens: Tensor
) -> tuple[Tensor, list[list[Tensor]], dict[str, list[Tensor]]]:
    """Return F, the tensors of `cut` at every boundary, and the stream: side -> x_l at each."""
    measured: list[list[Tensor]] = []
    states: dict[str, list[Tensor]] = {side: [] for side in model.stacks}
    replace = partial(cut, measured=measured, known=set())
    # Detached, so that the backward pass ends at the first sublayer.
    inputs = [x0.detach().requires_grad_() for x0 in model.inputs(tokens)]
    for side, _, x in boundaries(model, inputs, replace):
        states[side].append(visible(x).detach())
    return model.last.leave(x), measured, states


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
        if is_alike and y.requires_grad and y is not x and id(y) not in known:
            views[id(y)] = y.view_as(y)
    measured.append(list(views.values()))
    known.update(map(id, measured[-1]))
    return tree_map_only(Tensor, lambda y: views.get(id(y), y), stream)


def jacobian_norms(
    model: Transformer, tokens: Tensor, seed: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return ‖∂F/∂x_l‖_F²/dim F and its standard error: side -> two (depth + 1,).

    tokens: (batch, seq).  F of a sequence depends on the stream of that sequence alone, so its
    m values give E‖Rᵀ J‖² = ‖J‖_F²/m for R uniform on the unit sphere.  A sequence has
    DRAWS/batch values of R, but two or more, drawn by `seed`.  The error is that of their mean, by
    their deviation within each sequence.  With as many draws as values in F the rows of the
    identity take the place of R; the norm is then exact and the error 0.
    """
    batch, random = len(tokens), torch.Generator().manual_seed(seed)
    draws = max(2, DRAWS // batch)
    with evaluating(model), torch.enable_grad(), model.unfused():
        size = model.inputs(tokens[:1])[-1].numel()  # m
        exact = draws >= size
        draws = size if exact else draws
        copies = min(draws, max(1, VALUES_AT_ONCE // (batch * size)))
        F, measured, states = cut_pass(model, tokens.repeat(copies, 1))
        flat = [tensor for of_one in measured for tensor in of_one]
        squares: list[Tensor] = []  # (boundaries, copies, batch) of each backward pass
        for first in range(0, draws, copies):
            if exact:  # zeros in the place of rows beyond the last
                R = torch.eye(size)[first : first + copies, None].expand(-1, batch, -1)
                R = torch.cat([R, torch.zeros(copies - len(R), batch, size)])
            else:
                R = torch.randn(copies, batch, size, generator=random)
                R = R / R.norm(dim=-1, keepdim=True)
            R = R.reshape(F.shape).to(F)
            is_last = first + copies >= draws
            gradients = torch.autograd.grad(F, flat, R, retain_graph=not is_last, allow_unused=True)
            lengths = [by_sequence(g, copies * batch, F) for g in gradients]
            each = torch.stack(lengths).split([*map(len, measured)])
            sums = torch.stack([part.sum(dim=0) for part in each])
            squares.append(sums.unflatten(1, (copies, batch)))
    values = torch.cat(squares, dim=1)[:, :draws]  # (boundaries, draws, batch)
    means = values.mean(dim=(1, 2))
    errors = torch.zeros_like(means)
    if not exact:
        errors = (values.var(dim=1).sum(dim=1) / draws).sqrt() / batch
    depths = [*map(len, states.values())]
    both = zip(means.float().split(depths), errors.float().split(depths), strict=True)
    return dict(zip(states, both, strict=True))


def by_sequence(gradient: Tensor | None, count: int, like: Tensor) -> Tensor:
    """Return the square norm of a gradient (…, count, seq, d) for each sequence, in fp64."""
    if gradient is None:
        return like.new_zeros(count, dtype=torch.float64)
    squares = gradient.double().square().sum(dim=(-2, -1))
    return squares.reshape(-1, count).sum(dim=0)


def losses_without(
    model: Transformer, tokens: Tensor, loss: Callable[[Tensor], Tensor], count: int
) -> dict[str, Tensor]:
    """Return L with layer l replaced by the identity: side -> (depth,); see `Scheme.pass_over`.

    tokens: (batch, seq); loss: logits -> mean loss; count: how many layers are tried, one forward
    pass each, evenly spaced over all stacks; NaN for the others.  Nothing is trained in between.
    Gromov et al. 2024, arXiv:2403.17887, and Sun et al. 2025, arXiv:2502.05795, use this removal.
    """
    layers = model.layers
    losses = torch.full((len(layers),), torch.nan, device=tokens.device)
    with torch.no_grad(), evaluating(model):
        for index in divide_evenly(len(layers), count):
            losses[index] = loss(logits_without(model, tokens, layers[index]))
    depths = [len(stack.layers) for stack in model.stacks.values()]
    return dict(zip(model.stacks, losses.split(depths), strict=True))


def logits_without(model: Transformer, tokens: Tensor, skipped: Layer) -> Tensor:
    """Return the model's logits with one layer replaced by the identity."""

    def run(layers: Layers, x: Stream, memory: Tensor | None = None) -> Stream:
        for layer in layers:
            x = skipped.scheme.pass_over(x) if layer is skipped else layer(x, memory)
        return x

    with model.replace_runner(lambda _: run):
        logits: Tensor = model(tokens)
    return logits


def divide_evenly(total: int, count: int) -> list[int]:
    """Return `count` of 0, …, total − 1, evenly spaced with both ends; all of them if fewer."""
    if count >= total:
        return list(range(total))
    if count == 1:
        return [total - 1]
    return [round(i * (total - 1) / (count - 1)) for i in range(count)]
