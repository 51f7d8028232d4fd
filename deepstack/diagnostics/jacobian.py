"""Gradients by the stream at every layer boundary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from deepstack.diagnostics.update import evaluating
from deepstack.model import Transformer
from deepstack.schemes import Stream, visible


def separated(stream: Stream, boundaries: list[list[Tensor]]) -> Stream:
    """Return the stream as fresh views, and append those of the shape of x to `boundaries`.

    A gradient by such a view comes from later layers alone, even if the scheme carries the same
    tensor past several layers.  Past values, which some schemes keep in a nested tuple, are left.
    """
    shape = visible(stream).shape[-3:]
    items: list[Any] = [stream] if isinstance(stream, Tensor) else list(stream)
    views = [item.view_as(item) if isinstance(item, Tensor) else item for item in items]
    tensors = [v for v in views if isinstance(v, Tensor) and v.shape[-3:] == shape]
    boundaries.append([v for v in tensors if v.requires_grad])  # a stream may start at constants
    return views[0] if isinstance(stream, Tensor) else tuple(views)


def norms_by_boundary(norms: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return one norm for each boundary, given those of its tensors and their number."""
    parts = torch.stack([norm.reshape(()) for norm in norms]).split(list(sizes))
    return torch.stack([torch.linalg.vector_norm(part) for part in parts])


def jacobian_norms(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """Return ‖∂F/∂x_l‖_F²/dim F at every boundary: side -> (depth + 1,).

    tokens: (batch, seq).  E‖Rᵀ J‖² = ‖J‖_F² for independent N(0, 1) in R; one fixed draw of R is
    taken, and divided by ‖R‖² in the place of dim F.
    """
    boundaries: list[list[Tensor]] = []
    with evaluating(model), torch.enable_grad(), ExitStack() as block:
        for layer in model.layers:
            block.enter_context(layer.unfused())
        inputs = [x0.detach().requires_grad_() for x0 in model.inputs(tokens)]
        F = None
        for stack, x0 in zip(model.stacks.values(), inputs, strict=True):
            *_, last = stack.stream(x0, F, lambda x: separated(x, boundaries))
            F = stack.leave(last)
        assert F is not None
        R = torch.randn(F.shape, generator=torch.Generator().manual_seed(0)).to(F.device)
        wanted = [tensor for tensors in boundaries for tensor in tensors]
        gradients = torch.autograd.grad((F * R).sum(), wanted, allow_unused=True)
    zero = R.new_zeros(1)
    norms = torch._foreach_norm([zero if g is None else g for g in gradients])
    values = norms_by_boundary(norms, [len(tensors) for tensors in boundaries])
    sizes = [len(stack.layers) + 1 for stack in model.stacks.values()]
    shares = (values / R.norm()).square().split(sizes)
    return dict(zip(model.stacks, shares, strict=True))
