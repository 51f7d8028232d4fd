"""Gradients by the stream at every layer boundary."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from deepstack.diagnostics.update import evaluating
from deepstack.model import Transformer
from deepstack.schemes import Stream, visible


class Boundaries:
    """The tensors of the stream at every layer boundary, by which a gradient is measured.

    tensors: at each boundary x_l, and those of its shape beside it in a stream of several.  Past
    values do not count: neither in a nested tuple, nor if a scheme carries them on unchanged.
    """

    def __init__(self) -> None:
        self.tensors: list[list[Tensor]] = []
        self._known: set[int] = set()

    def add(self, stream: Stream) -> None:
        """Add the next boundary."""
        x = visible(stream)
        beside = () if stream is x else stream[1:]
        others = [
            y for y in beside
            if isinstance(y, Tensor) and y.shape[-3:] == x.shape[-3:]
            and y.requires_grad  # a stream may start at constants
            and y is not x and id(y) not in self._known
        ]  # fmt: skip
        self.tensors.append([x, *others])
        self._known |= {id(y) for y in (x, *others)}

    def flat(self) -> list[Tensor]:
        """Return the tensors of all boundaries in order."""
        return [tensor for tensors in self.tensors for tensor in tensors]

    def release(self) -> list[int]:
        """Release the tensors, which keep the graph, and return their number at each boundary."""
        sizes = [len(tensors) for tensors in self.tensors]
        self.tensors.clear()
        return sizes


def join(norms: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return one norm for each boundary, given those of its tensors and their number."""
    parts = torch.stack([norm.reshape(()) for norm in norms]).split(list(sizes))
    return torch.stack([torch.linalg.vector_norm(part) for part in parts])


def jacobian_norms(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """Return ‖∂F/∂x_l‖_F²/dim F at every boundary: side -> (depth + 1,).

    tokens: (batch, seq).  E‖Rᵀ J‖² = ‖J‖_F² for independent N(0, 1) in R; one fixed draw of R is
    taken, and divided by ‖R‖² in the place of dim F.
    """
    boundaries = Boundaries()
    with evaluating(model), torch.enable_grad(), ExitStack() as block:
        for layer in model.layers:
            block.enter_context(layer.unfused())
        inputs = [x0.detach().requires_grad_() for x0 in model.inputs(tokens)]
        F = None
        for stack, x0 in zip(model.stacks.values(), inputs, strict=True):
            for stream in stack.stream(x0, F):
                boundaries.add(stream)
            F = stack.leave(stream)
        assert F is not None
        R = torch.randn(F.shape, generator=torch.Generator().manual_seed(0)).to(F.device)
        gradients = torch.autograd.grad((F * R).sum(), boundaries.flat(), allow_unused=True)
    zero = R.new_zeros(1)
    norms = torch._foreach_norm([zero if g is None else g for g in gradients])
    values = join(norms, boundaries.release())
    sizes = [len(stack.layers) + 1 for stack in model.stacks.values()]
    shares = (values / R.norm()).square().split(sizes)
    return dict(zip(model.stacks, shares, strict=True))
