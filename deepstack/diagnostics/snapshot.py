"""Snapshots: values of every layer from separate forward and backward passes on the probe batch.

The passes run in evaluation mode, in fp32 and as plain modules.  They draw no random number and
change no gradient of training, so that training continues bit for bit as without them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deepstack.diagnostics.sublayer_statistics import SublayerStatistics, record_values
from deepstack.diagnostics.update import evaluating, measuring
from deepstack.model import Transformer
from deepstack.model.banks import Bank, layer_norms
from deepstack.model.sublayers import scaled_linear
from deepstack.schemes import Scheme, Stream, visible

# The names of the values that instruments add to snapshots.
ADDED: set[str] = set()


@dataclass
class Snapshot(SublayerStatistics):
    """Values of one stack at one step; diagnostics are pure functions of it.

    S counts the sublayers of a layer; every mean, norm or variance of a token is over its d values.

    - sublayers: their S names.  schemes: the scheme of each layer.
    - matrices, initial: role -> its matrix in every layer, (depth, n_out, n_in), at θ_t and at θ_0.
      scaled: whether products with them are divided by sqrt(n_in) (`model.init.distribution: ntk`).

    (depth + 1, …), at every layer boundary, x_0 first:

    - states: (depth + 1, batch, seq, d), the stream x_l.
    - stream: (depth + 1, tokens), ‖x_l‖₂.
    - stream_grad: norm of the loss's gradient with respect to x_l; it counts all tensors of `cut`.

    Every sublayer: the fields of `SublayerStatistics`.

    (depth,), of every layer:

    - entropy, largest_logit: sublayer -> mean entropy and largest logit of its attention.
    - grad_norm, param_norm, param_update_norm.  matrix_grad_norm: of its weight matrices alone.

    loss: the probe loss.
    shared: values that diagnostics share.
    added: the values that instruments add (`Instrument.adds`) if the configuration requests them.
        Each is also an attribute, which is None without a request: initial_states, jacobian, …
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
    added: Mapping[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the value that an instrument added under this name, or None."""
            if name in ADDED:
                return self.added.get(name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def boundaries(
    model: Transformer,
    inputs: Sequence[Tensor],
    replace: Callable[[Stream], Stream] = lambda stream: stream,
    memory: Tensor | None = None,
) -> Iterator[tuple[str, int, Stream]]:
    """Run the stacks on their inputs; yield side, layer and stream at every layer boundary.

    The layer is 0 for the x_0 of a stack; layers of a decoder are numbered after the encoder's.

    replace: returns equal values, which the next layer reads.
    memory: `Transformer.first_memory` of the tokens.
    """
    number = 0
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
    with measuring(model):
        for side, _, stream in boundaries(
            model, model.inputs(tokens), memory=model.first_memory(tokens)
        ):
            states[side].append(visible(stream))
    return {side: torch.stack(values) for side, values in states.items()}


Passes = dict[str, dict[str, Any]]
"""What the passes of a snapshot measure in each stack, by side; the tensors by name:

- loss: the probe loss.
- states: (depth + 1, batch, seq, d), the stream.
- stream_grad: (depth + 1,), norms of gradients with respect to it.
- lengths: (depth, parameters), norms of gradients with respect to each parameter of a layer.
- sublayers: the fields of `SublayerStatistics`.
- attention: sublayer -> (depth, 2), mean entropy and largest logit.
"""


def run_passes(model: Transformer, tokens: Tensor, *, loss: Callable[[Tensor], Tensor]) -> Passes:
    """Run the forward and backward pass of a snapshot and return their values.

    They are functions of parameters and tokens alone, so that the operations can be replayed.

    loss: logits -> mean loss on the probe batch.
    """
    trained = [p for layer in model.layers for p in layer.parameters() if p.requires_grad]
    with evaluating(model), torch.enable_grad(), record_values(model) as recorded:
        value, lengths, stream_grad, streams = gradient_norms(
            model, tokens, lambda F: loss(model.head(F, model.embedding)), trained
        )
        for tap in reversed(recorded.values()):
            tap.free_graph()
    passes: Passes = {}
    for side, stack in model.stacks.items():
        depth, tap = len(stack.layers), recorded[side]
        states = torch.stack(streams[side])
        # All layers of a stack have the same parameters.
        count = sum(p.requires_grad for p in stack.layers[0].parameters())
        of_stack, lengths = lengths.tensor_split([depth * count])
        passes[side] = {
            "loss": value,
            "states": states,
            "stream_grad": stream_grad[side],
            "lengths": of_stack.view(depth, count),
            "sublayers": tap.statistics(depth, len(stack.schemes[0].sublayers), states[0]),
            "attention": {name: torch.stack(v) for name, v in tap.attention.items() if v},
        }
    return passes


def take(
    model: Transformer,
    layer_banks: Sequence[Bank],
    tokens: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    before: Sequence[Tensor] | None,
    initial: Sequence[Tensor],
    added: Mapping[str, Mapping[str, Any]] | None = None,
    passes: Passes | None = None,
) -> list[Snapshot]:
    """Take a snapshot of each stack of the model at its current parameters.

    layer_banks: the banks of the layers.
    loss: logits -> mean loss on the probe batch.
    before: values of these banks before the last step, None at initialisation.
    initial: at θ_0.
    added: the values that instruments add, name -> side -> value.
    passes: the result of `run_passes` at these parameters, if it is known.
    """
    passes = passes or run_passes(model, tokens, loss=loss)
    snapshots = []
    for side, stack in model.stacks.items():
        measured = passes[side]
        states, gradients, attention = (
            measured[name] for name in ("states", "lengths", "attention")
        )
        chosen = [index for index, bank in enumerate(layer_banks) if bank.stack == side]
        banks = [layer_banks[index] for index in chosen]
        values = [bank.values() for bank in banks]
        earlier = values if before is None else [before[index] for index in chosen]
        starts = [initial[index].to(states.device) for index in chosen]
        of_layer = [p for p in stack.layers[0].parameters() if p.requires_grad]
        is_matrix = [getattr(p, "start", "") == "matrix" for p in of_layer]
        snapshots.append(
            Snapshot(
                **measured["sublayers"],
                sublayers=stack.schemes[0].sublayers,
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
                stream_grad=measured["stream_grad"],
                param_norm=layer_norms(values),
                param_update_norm=layer_norms(
                    [a - b for a, b in zip(values, earlier, strict=True)]
                ),
                loss=measured["loss"],
                added={name: by_side[side] for name, by_side in (added or {}).items()},
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
    """Return a function of F, norms of its gradients, and the stream.

    The gradients are with respect to parameters and stream.

    of: F -> 0-d.  The norms for the stream are side -> (depth + 1,), one for each boundary; the
        stream is side -> x_l at each of them.
    """
    F, measured, states = cut_pass(model, tokens)
    value = of(F)
    flat = [tensor for of_one in measured for tensor in of_one]
    # A scheme may own a parameter that its layers do not use; its gradient is 0.
    nothing = value.new_zeros(1)
    lengths = [nothing[0]] * len(parameters)
    # A parameter's norm is taken once its gradient is known, so that a recorded pass needs memory
    # for one gradient and not for all.
    hooks = [p.register_hook(partial(put_norm, lengths, i)) for i, p in enumerate(parameters)]
    gradients = torch.autograd.grad(value, [*parameters, *flat], allow_unused=True)
    for hook in hooks:
        hook.remove()
    of_stream = gradients[len(parameters) :]
    norms = torch._foreach_norm([nothing if g is None else g for g in of_stream])
    each = torch.stack([norm.reshape(()) for norm in norms]).split([*map(len, measured)])
    by_boundary = torch.stack([torch.linalg.vector_norm(part) for part in each])
    by_side = dict(zip(states, by_boundary.split([*map(len, states.values())]), strict=True))
    by_parameter = torch.stack(lengths) if lengths else value.new_zeros(0)
    return value.detach(), by_parameter, by_side, states


def put_norm(norms: list[Tensor], index: int, gradient: Tensor) -> None:
    """Put the norm of a gradient into its place in a list."""
    norms[index] = torch.linalg.vector_norm(gradient)


def cut_pass(
    model: Transformer, tokens: Tensor
) -> tuple[Tensor, list[list[Tensor]], dict[str, list[Tensor]]]:
    """Return F, the tensors of `cut` at every boundary, and the stream: side -> x_l at each."""
    measured: list[list[Tensor]] = []
    states: dict[str, list[Tensor]] = {side: [] for side in model.stacks}
    replace = partial(cut, measured=measured, known=set())
    # Detached, so that the backward pass ends at the first sublayer.
    inputs = [x0.detach().requires_grad_() for x0 in model.inputs(tokens)]
    for side, _, x in boundaries(model, inputs, replace, model.first_memory(tokens)):
        states[side].append(visible(x).detach())
    return model.last.leave(x), measured, states


def cut(stream: Stream, measured: list[list[Tensor]], known: set[int]) -> Stream:
    """Return the stream at a layer boundary with views of its tensors; append these to `measured`.

    Only later layers read a view: the gradient with respect to it leaves out its use in other
    tensors of the same boundary.  Views are made of x_l and of the tensors of its shape beside it
    in a stream of several.  Past values do not count: neither in a nested tuple, nor if a scheme
    carries them on unchanged.

    known: the ids of all views so far, to which these are added.
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
