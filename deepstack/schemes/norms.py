"""The norms of a stack: one module each, with its formula.  `model.norm.kind` names one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from deepstack.base.errors import PluginError
from deepstack.base.kinds import Definition, Kind
from deepstack.config.sizes import NORM_SIZES
from deepstack.schemes.role import parameter

Statistics = Literal["own", "own_and_followed", "followed"]
"""The mean and variance that a batch norm uses.

'own': mean and variance of its input batch.  'own_and_followed': the same, and they update the
running averages.  'followed': the running averages."""


NORMS: Kind[StackNorm] = Kind("norm", "model.norm.kind")


class StackNorm(nn.Module, Definition, kind=NORMS):
    """z -> norm(z), over the last axis of z, with a gain g and a bias b, (d,), if configured.

    Each norm is a subclass with a name; its parameters are made with `parameter`.

    roles: the role of the gain (and of every other trained parameter), and the role of the bias.
    start: the initial value of the trained scalars of norms that have them.
    static: declared in the first line of the class, and not inherited.  It promises that every step
        runs the same operations and reads no Python value that changes.  Only then are steps
        recorded and replayed.
    """

    shape: tuple[int]
    eps: float
    start: float
    roles: tuple[str, str]
    gain: nn.Parameter | None
    bias: nn.Parameter | None
    static: ClassVar[bool] = False
    fixes_scale: ClassVar[bool] = True  # whether the scale of the output is independent of z's
    by_token: ClassVar[bool] = True  # whether a token's output depends on that token alone
    scalars: ClassVar[int] = 0  # trained numbers beside gain and bias, for the estimate of memory
    keeps_output: ClassVar[bool] = True  # whether a step keeps its output before the gain

    def __init_subclass__(cls, *, name: str = "", static: bool = False, **more: Any) -> None:
        super().__init_subclass__(name=name, **more)
        if name and cls.forward is nn.Module.forward:
            raise PluginError(f"the norm {name}: it has no forward(self, z)")
        if name:
            cls.static = static

    def __init__(
        self,
        d: int,
        *,
        eps: float,
        gain: bool,
        bias: bool,
        start: float = 0.5,
        roles: tuple[str, str] = ("norm_gain", "norm_bias"),
    ) -> None:
        super().__init__()
        self.shape = (d,)
        self.eps, self.start, self.roles = eps, start, roles
        self.gain = parameter(d, role=roles[0], start="one") if gain else None
        self.bias = parameter(d, role=roles[1], start="zero") if bias else None

    def scaled(self, y: Tensor) -> Tensor:
        """Return g * y + b, without a gain or bias that is not configured."""
        y = y if self.gain is None else y * self.gain
        return y if self.bias is None else y + self.bias


class LayerNorm(StackNorm, name="layer", static=True):
    """LN(z) = g * (z - mean(z)) / sqrt(var(z) + eps) + b, over the last axis.

    z: (batch, seq, d); g, b: (d,), each optional in the configuration; var is the biased
    variance.  Ba et al. 2016, arXiv:1607.06450.
    """

    scalars, keeps_output = NORM_SIZES["layer"]

    def forward(self, z: Tensor) -> Tensor:
        # autocast on a CPU leaves z in bf16; on a GPU it converts z itself
        return torch.layer_norm(in_fp32(z), self.shape, self.gain, self.bias, self.eps)


class RMSNorm(StackNorm, name="rms", static=True):
    """RMSNorm(z) = g * z / sqrt(mean(z^2) + eps) + b, over the last axis.

    z: (batch, seq, d); g, b: (d,), each optional in the configuration.  The paper's equation 4 has
    no b, and in its authors' code b is an option; most language models have none
    (`model.norm.bias: false`).  Zhang & Sennrich 2019, arXiv:1910.07467.
    """

    def forward(self, z: Tensor) -> Tensor:
        y = torch.rms_norm(in_fp32(z), self.shape, self.gain, self.eps)
        return y if self.bias is None else y + self.bias


class DynamicTanh(StackNorm, name="dynamic_tanh", static=True):
    """DyT(z) = g * tanh(a z) + b, a a trained scalar, `model.norm.start` (0.5) at the start.

    z: (batch, seq, d); g, b: (d,), each optional in the configuration; eps is not used.
    It has no statistics: it acts on every number alone.  Zhu et al. 2025, arXiv:2503.10622.
    """

    fixes_scale = False
    scalars, keeps_output = NORM_SIZES["dynamic_tanh"]

    def __init__(self, d: int, **common: Any) -> None:
        super().__init__(d, **common)
        self.scale = parameter(1, role=self.roles[0], start=self.start)

    def forward(self, z: Tensor) -> Tensor:
        return self.scaled(torch.tanh(self.scale * z))


class DynamicErf(StackNorm, name="dynamic_erf", static=True):
    """Derf(z) = g * erf(a z + s) + b, a and s trained scalars, `model.norm.start` (0.5) and 0.

    z: (batch, seq, d); g, b: (d,), each optional in the configuration; eps is not used.
    It has no statistics: it acts on every number alone.  a and s have the role of the gain.  Chen
    et al. 2025, arXiv:2512.10938; a and s start as in the authors' code.
    """

    fixes_scale = False
    scalars, keeps_output = NORM_SIZES["dynamic_erf"]

    def __init__(self, d: int, **common: Any) -> None:
        super().__init__(d, **common)
        self.scale = parameter(1, role=self.roles[0], start=self.start)
        self.shift = parameter(1, role=self.roles[0], start="zero")

    def forward(self, z: Tensor) -> Tensor:
        return self.scaled(torch.erf(self.scale * z + self.shift))


class BoundedTanh(StackNorm, name="bounded_tanh", static=True):
    """BHyT(z) = g * tanh(a z / (10 sqrt(mean(z^2) + eps))) + b, a a trained scalar, 1 at the start.

    z: (batch, seq, d); g, b: (d,), each optional in the configuration.  The output is bounded by
    the gain, and its scale does not depend on z's.  Lee et al. 2026, arXiv:2601.09719; the factor
    kappa = 10 and the start are those of the authors' code (github.com/MLAI-Yonsei/BHyT), in which
    the second norm of a layer may take its mean square from the first one: not so here.
    """

    scalars, keeps_output = NORM_SIZES["bounded_tanh"]
    KAPPA = 10.0

    def __init__(self, d: int, **common: Any) -> None:
        super().__init__(d, **common)
        self.scale = parameter(1, role=self.roles[0], start="one")

    def forward(self, z: Tensor) -> Tensor:
        z = in_fp32(z)
        factor = torch.rsqrt(z.square().mean(-1, keepdim=True) + self.eps) / self.KAPPA
        return self.scaled(torch.tanh(self.scale * (factor * z)))


class BatchNorm(StackNorm, name="batch", static=True):
    """BN(z) = g * (z - mean(z)) / sqrt(var(z) + eps) + b, over batch and positions, by channel.

    z: (…, d); g, b: (d,), each optional in the configuration; mean and var: (d,), of the input
    batch (var biased) or running averages over the training batches.  The averages use the
    factor MOMENTUM, or the plain mean while batches are few, and unbiased variances.  Before the
    first batch, the input batch's own are used.  Ioffe & Szegedy 2015, arXiv:1502.03167.

    `statistics` chooses between them (see `Statistics`).  nn.Module's `training` has no effect: a
    model without dropout trains in evaluation mode, and a probe must use its batch's statistics.
    """

    by_token = False
    scalars, keeps_output = NORM_SIZES["batch"]
    MOMENTUM = 0.1
    REMEMBERED = ("running_mean", "running_var", "batches")
    running_mean: Tensor
    running_var: Tensor
    batches: Tensor

    def __init__(self, d: int, **common: Any) -> None:
        super().__init__(d, **common)
        self.statistics: Statistics = "own"
        for name, width in zip(self.REMEMBERED, (d, d, 1), strict=True):
            self.register_buffer(name, torch.zeros(width, device="cpu"), persistent=False)

    def forward(self, z: Tensor) -> Tensor:
        flat = in_fp32(z).reshape(-1, *self.shape)
        if self.statistics == "followed":
            # torch.batch_norm has no derivative by given statistics
            var, mean = torch.var_mean(flat.detach(), dim=0, correction=0)
            known = self.batches > 0
            mean = torch.where(known, self.running_mean, mean)
            var = torch.where(known, self.running_var, var)
            y = torch.batch_norm(flat, self.gain, self.bias, mean, var, False, 0.0, self.eps, False)
            return y.view(z.shape)
        if self.statistics == "own_and_followed":
            self.follow(flat)
        y = torch.batch_norm(flat, self.gain, self.bias, None, None, True, 0.0, self.eps, False)
        return y.view(z.shape)

    @torch.no_grad()
    def follow(self, flat: Tensor) -> None:
        """Move the running averages towards this batch, (tokens, d)."""
        var, mean = torch.var_mean(flat, dim=0, correction=1)
        self.batches += 1
        share = (1 / self.batches).clamp(min=self.MOMENTUM)
        self.running_mean += share * (mean - self.running_mean)
        self.running_var += share * (var - self.running_var)


def norm_with_kernels(module: object) -> LayerNorm | RMSNorm | None:
    """Return a module that is a LayerNorm or an RMSNorm, for which there are kernels, else None.

    A subclass is another norm.
    """
    if type(module) is LayerNorm or type(module) is RMSNorm:
        return module
    return None


def in_fp32(z: Tensor) -> Tensor:
    """Return z, or a copy in fp32 if z is in bf16 (the result of a product under autocast)."""
    return z.float() if z.dtype is torch.bfloat16 else z


def in_full_precision(z: Tensor) -> AbstractContextManager[None]:
    """Return a context that disables autocast if it is enabled for the device of z."""
    if torch.is_autocast_enabled(z.device.type):
        return torch.autocast(z.device.type, enabled=False)
    return nullcontext()
