"""Norms of a stack: each a module with its formula and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from deepstack.speed.parameter import parameter


class LayerNorm(nn.Module):
    """LN(z) = g * (z - mean(z)) / sqrt(var(z) + eps) + b, over the last axis.

    z: (batch, seq, d); g, b: (d,), each left out when the configuration says so; var is the
    biased variance.  Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(
        self,
        d: int,
        *,
        eps: float,
        gain: bool,
        bias: bool,
        roles: tuple[str, str] = ("norm_gain", "norm_bias"),
    ) -> None:
        super().__init__()
        self.shape = (d,)
        self.eps = eps
        self.gain = parameter(d, role=roles[0], start="one") if gain else None
        self.bias = parameter(d, role=roles[1], start="zero") if bias else None

    def forward(self, z: Tensor) -> Tensor:
        return torch.layer_norm(z, self.shape, self.gain, self.bias, self.eps)

    def bound(self) -> Callable[[Tensor], Tensor]:
        """The same as a plain function of z: what a module costs to look into is saved."""
        shape, gain, bias, eps = self.shape, self.gain, self.bias, self.eps
        return lambda z: torch.layer_norm(z, shape, gain, bias, eps)
