"""z/‖z‖ over the last axis, in as few operations as a step that is replayed can have of it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LEAST_NORM = 1e-12
"""Of a vector: one that is not longer is taken for 0, which has no direction, and stays so."""


def lengths(z: Tensor, dim: int = -1) -> Tensor:
    """‖z‖ along an axis that stays, of length 1; infinite for a vector that is taken for 0."""
    if dim in (-1, z.ndim - 1):
        norms = torch.linalg.vector_norm(z, dim=dim, keepdim=True)
    else:  # across rows the same in a tenth of the time
        norms = z.square().sum(dim=dim, keepdim=True).sqrt_()
    return F.threshold(norms, LEAST_NORM, math.inf)


class Unit(torch.autograd.Function):
    """y = z/n, n = ‖z‖;  dz = (dy - (y·dy) y)/n, the part of dy that is across y.

    z: (…, d) -> y, (…, d), and n, (…, 1).  Of z = 0: y = 0 and dz = 0.
    """

    @staticmethod
    def forward(z: Tensor) -> tuple[Tensor, Tensor]:
        n = lengths(z)
        return z / n, n

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        y, n = output
        ctx.mark_non_differentiable(n)
        ctx.save_for_backward(y, n)
        ctx.save_for_forward(y, n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return across(gradients[0], *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[Tensor, None]:
        return across(tangents[0], *ctx.saved_tensors), None


def across(v: Tensor, y: Tensor, n: Tensor) -> Tensor:
    """(v - (y·v) y)/n, what moves z/n where v moves z, and the other way round."""
    return torch.addcmul(v, y, (y * v).sum(dim=-1, keepdim=True), value=-1) / n


def unit(z: Tensor) -> Tensor:
    """z/‖z‖ over the last axis, (…, d), in fp32; 0 where z is."""
    z = z.float() if z.dtype is torch.bfloat16 else z
    if torch.compiler.is_compiling():  # it takes derivatives itself, and makes one kernel of each
        return z / lengths(z)
    y: Tensor = Unit.apply(z)[0]
    return y
