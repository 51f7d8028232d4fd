"""Gradients by the stream at every layer boundary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepstack.diagnostics.update import evaluating
from deepstack.model import Transformer
from deepstack.schemes import Stream, visible


def boundary_tensors(stream: Stream, known: set[int]) -> list[Tensor]:
    """Return the tensors of the stream at a layer boundary, by which a gradient is measured.

    They are x_l, and those of its shape beside it in a stream of several.  Past values do not
    count: neither in a nested tuple, nor if a scheme carries them on unchanged.  known: the ids of
    the tensors of earlier boundaries.
    """
    x = visible(stream)
    tensors = [x]
    for y in () if stream is x else stream[1:]:
        is_alike = isinstance(y, Tensor) and y.shape[-3:] == x.shape[-3:]
        # a stream may start at constants, which have no gradient
        if is_alike and y.requires_grad and y is not x and id(y) not in known:
            tensors.append(y)
    return tensors


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
    boundaries: list[list[Tensor]] = []
    known: set[int] = set()
    # Detached leaves: the gradient goes down to the first sublayer and no further.
    inputs = [x0.detach().requires_grad_() for x0 in model.inputs(tokens)]
    F = None
    for (side, stack), x0 in zip(model.stacks.items(), inputs, strict=True):
        for x in stack.stream(x0, F):
            boundaries.append(boundary_tensors(x, known))
            known |= {id(tensor) for tensor in boundaries[-1]}
            visit(side, x)
        F = stack.leave(x)
    assert F is not None
    value = of(F)
    # A scheme may own a parameter that its wiring does not use: its gradient is zero.
    tensors = [*parameters, *(tensor for of_one in boundaries for tensor in of_one)]
    gradients = torch.autograd.grad(value, tensors, allow_unused=True)
    norms = torch._foreach_norm([value.new_zeros(1) if g is None else g for g in gradients])
    parts = torch.stack([norm.reshape(()) for norm in norms[len(parameters) :]])
    each = parts.split([len(of_one) for of_one in boundaries])
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
