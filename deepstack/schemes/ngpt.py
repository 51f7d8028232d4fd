"""The normalised Transformer: stream, branches and the vectors of every matrix have unit norm."""

import math
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from deepstack.schemes.parts import Parts
from deepstack.schemes.role import parameter
from deepstack.schemes.scheme import Scheme, Sublayer

LEAST_NORM = 1e-12
"""The norm up to which a vector counts as 0, which has no direction and stays 0."""


def lengths(z: Tensor, dim: int = -1) -> Tensor:
    """Return ‖z‖ along an axis, which is kept with length 1; infinite where z counts as 0."""
    if dim in (-1, z.ndim - 1):
        norms = torch.linalg.vector_norm(z, dim=dim, keepdim=True)
    else:  # for columns, a tenth of the time of vector_norm
        norms = z.square().sum(dim=dim, keepdim=True).sqrt_()
    return F.threshold(norms, LEAST_NORM, math.inf)


class Unit(torch.autograd.Function):
    """y = z/n, n = ‖z‖;  dz = (dy - (y·dy) y)/n, from the part of dy orthogonal to y.

    z: (…, d) -> y, (…, d), and n, (…, 1).  If z = 0, y = 0 and dz = 0.
    """

    @staticmethod
    def forward(z: Tensor) -> tuple[Tensor, Tensor]:
        n = lengths(z)
        return z / n, n

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        y, n = output
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, n)
        ctx.save_for_forward(y, n)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensor | None:
        dy, dn = gradients
        y, n = ctx.saved_tensors
        dz = None if dy is None else across(dy, y, n)
        if dn is None:  # n has a gradient only in a second backward pass
            return dz
        return y * dn if dz is None else dz + y * dn

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> tuple[Tensor, Tensor]:
        y, n = ctx.saved_tensors
        return across(tangents[0], y, n), (y * tangents[0]).sum(dim=-1, keepdim=True)


def across(v: Tensor, y: Tensor, n: Tensor) -> Tensor:
    """Return (v - (y·v) y)/n: the symmetric Jacobian of z/n applied to v, forward or backward."""
    return torch.addcmul(v, y, (y * v).sum(dim=-1, keepdim=True), value=-1) / n


def unit(z: Tensor) -> Tensor:
    """Return z/‖z‖ over the last axis, (…, d), with bf16 converted to fp32; 0 where z is 0."""
    z = z.float() if z.dtype is torch.bfloat16 else z
    if torch.compiler.is_compiling():  # the compiler derives the backward pass and fuses each pass
        return z / lengths(z)
    y: Tensor = Unit.apply(z)[0]  # type: ignore[no-untyped-call]
    return y


GIVING = ("o", "w2")
"""The matrices whose columns lie along the stream; for the others, the rows do."""


def unit_heads(h: Tensor) -> Tensor:
    """Return Norm(h) in every head, (batch, head, seq, d_head), computed in memory order."""
    return unit(h.transpose(1, 2)).transpose(1, 2)


class UnitKeys(nn.Module):
    """k <- Norm(k) in every head.  k: (batch, head, seq, d_head)."""

    def forward(self, k: Tensor) -> Tensor:
        return unit_heads(k)


class UnitQueries(nn.Module):
    """q <- d_head s_qk^2 * Norm(q) in every head.  q: (batch, head, seq, d_head).

    With keys of norm 1 the logits are q kᵀ / sqrt(d_head) = sqrt(d_head) (s_qk * Norm(q))
    (s_qk * Norm(k))ᵀ; one factor applies s_qk to both.  s_qk (head, 1, d_head) is 1 at the start,
    and is stored as s_qk / sqrt(d_model).
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        d, heads = parts.d_model, parts.n_heads
        self.s = parameter(heads, 1, d // heads, role="scheme", start=d**-0.5)
        self.factor = d * (d // heads)

    def forward(self, q: Tensor) -> Tensor:
        return unit_heads(q) * (self.s.square() * self.factor)


class ScaledRows(nn.Module):
    """W_1, b_1 <- S W_1, S b_1, S = diag(sqrt(d_model) s_v): scales the activation's input.

    With a gate, W_3 and b_3 lie below them and are scaled by s_u, without the root.  s = [s_v;
    s_u] is trained, (d_ff,) or (2 d_ff,), and 1 at the start.  To scale d_ff rows of d_model
    numbers takes less than to scale the d_ff numbers of every token; the result is the same.
    """

    root: Tensor

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        of_v = torch.full((parts.d_ff,), parts.d_model**0.5)
        root = torch.cat([of_v, torch.ones(parts.d_ff)]) if parts.gated else of_v
        self.s = parameter(len(root), role="scheme", start="one")
        self.register_buffer("root", root, persistent=False)

    def forward(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        s = self.s * self.root
        return weight * s[:, None], None if bias is None else bias * s


class NGPT(Scheme, name="ngpt", label="nGPT", paper="arXiv:2410.01131", static=True):
    """x <- Norm(x + a * (Norm(G(x)) - x)), Norm(z) = z/‖z‖, W's vectors along x kept at norm 1.

    Loshchilov et al. 2024, arXiv:2410.01131, as in the authors' code (`model.py` of
    github.com/NVIDIA/ngpt).  The stream stays on the unit sphere, and there is no LN, before a
    branch or elsewhere (`model.norm` is not used).  a = |alpha|, (d_model,), of each sublayer
    starts at `start`.  Every vector along the stream in q, k, v, w1, w3 (rows), o and w2 (columns)
    is normalised at the start and after each step.  So the scale of `model.init` has no effect.
    Queries and keys have norm 1 in each head, times s_qk, and the softmax takes sqrt(d_head) times
    their products.  In the feed-forward v = sqrt(d_model) s_v * (W_1 x) enters the activation.
    With a gate, as in the paper's MLP, u = s_u * (W_3 x) multiplies its output.  alpha, s_qk, s_u
    and s_v are trained vectors.  The first two are stored with the initial value 1/sqrt(d_model)
    and multiplied up, so that a step moves them more.  The code has the root on u too; Norm
    cancels it if there are no biases.

    The configuration determines everything outside the layers.  x_0 is normed on entry, but the
    tables are not; the paper keeps them on the sphere.  F = sqrt(d_model) x_N has the scale of
    other schemes' last norm, so a head's logits start as theirs.  The paper's scale of each logit,
    s_z, is left out: the rows of a head have any length and include it.  The paper has no biases
    (`model.bias: false`), warm-up or weight decay, and has rotary positions, which turn q and k
    before s_qk there and after it here.  The code's rotary embedding is not a rotation
    (`docs/errata.md`).
    """

    norms_per_sublayer = 0
    extra_streams = 1
    start: Annotated[float | None, Field(gt=0, description="where a starts; null: at 1/N")] = 0.05

    def setup(self, parts: Parts) -> None:
        d = parts.d_model
        self.root = d**0.5
        self.factor = (1 / self.depth if self.start is None else self.start) * self.root
        self.add_per_sublayer("alpha", lambda: parameter(d, role="scheme", start=1 / self.root))
        self.slots["q"], self.slots["k"] = UnitQueries(parts), UnitKeys()
        self.slots["w1"] = ScaledRows(parts)

    @classmethod
    def project(cls, role: str, matrices: Tensor) -> None:
        matrices.div_(lengths(matrices, dim=1 if role in GIVING else 2))

    def enter(self, x: Tensor) -> Tensor:
        return unit(x)

    def residual(self, x: Tensor, G: Sublayer, *, alpha: Tensor) -> Tensor:
        a = torch.abs(alpha * self.factor)
        return unit(torch.lerp(x, unit(G(x)), a))

    def leave(self, stream: Tensor, norm: object) -> Tensor:
        return self.root * stream
