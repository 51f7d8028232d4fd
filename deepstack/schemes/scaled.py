"""Schemes with a scaled branch or stream: Pre-LN with factors, and schemes without a norm."""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from deepstack.config import Config, StackSizes
from deepstack.schemes.deepnorm import VALUE_PATH
from deepstack.schemes.parts import FAMILIES, Parts
from deepstack.schemes.role import parameter
from deepstack.schemes.scheme import Norm, Scheme, Sublayer


class LNScaling(
    Scheme, name="ln_scaling", label="LayerNorm Scaling", paper="arXiv:2502.05795", static=True
):
    """x <- x + G(LN(x) / sqrt(l)).  Sun et al. 2025, arXiv:2502.05795 (The Curse of Depth).

    l is the layer, the same for attention and feed-forward; the final norm is not scaled.  The
    authors' public code never executes its branch for this equation (`docs/errata.md`).
    """

    final_norm = True
    factor: Tensor

    def setup(self, parts: Parts) -> None:
        self.register_buffer("factor", torch.tensor(self.layer_index**-0.5), persistent=False)

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return x + G(norm(x) * self.factor)


class LayerScale(
    Scheme, name="layer_scale", label="LayerScale", paper="arXiv:2103.17239", static=True
):
    """x <- x + s * G(LN(x)), s a trained vector.  Touvron et al. 2021, arXiv:2103.17239, section 2.

    s (d_model) starts at 0.1 up to 18 layers, at 1e-5 up to 24 and at 1e-6 beyond, or at `start`.
    """

    final_norm = True
    start: Annotated[float | None, Field(description="where s starts; null: by depth")] = None

    def setup(self, parts: Parts) -> None:
        usual = 0.1 if self.depth <= 18 else 1e-5 if self.depth <= 24 else 1e-6
        start = usual if self.start is None else self.start
        self.add_per_sublayer("scale", lambda: parameter(parts.d_model, role="scheme", start=start))

    def residual(self, x: Tensor, G: Sublayer, norm: Norm, *, scale: Tensor) -> Tensor:
        return x + scale * G(norm(x))


class GPAS(Scheme, name="gpas", label="GPAS", paper="arXiv:2506.22049", static=True):
    """y = x + G(LN(x)), x <- y - SiLU(g) sg(y), sg: without its gradient.  Chen et al. 2025.

    arXiv:2506.22049, section 3: Pre-LN whose stream is scaled by 1 - SiLU(g), while gradients flow
    as if it were not.  g is a trained number of each layer; it starts at 0, which is Pre-LN.  Both
    sublayers share it, as in the authors' code, which clips its gradient separately for large
    models.  The gradients differ from F's, so measurements to first order and of curvature do not
    measure F either.
    """

    final_norm = True

    def setup(self, parts: Parts) -> None:
        self.gate = parameter(1, role="scheme", start="zero")

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        y = x + G(norm(x))
        return y - F.silu(self.gate) * y.detach()


class DeepScaleLM(
    Scheme, name="deep_scale_lm", label="DeepScaleLM", paper="arXiv:2403.09635", static=True
):
    """x <- lambda x + b G(LN(x)), lambda^2 + b^2 = 1, b^2 = k/N.  Kedia et al. 2024, 2403.09635.

    The residual coefficients of the paper (k = 2), with b^2 at most 1/2 if N < 2k.  Its moments for
    the start of every matrix are not applied: the configuration chooses how matrices start.  The
    authors' code uses b^2 = 0.005 for 192 layers, equal to k = 1 here: N may count sublayers.
    """

    final_norm = True
    k: Annotated[float, Field(gt=0, description="b^2 = k/N")] = 2.0

    def setup(self, parts: Parts) -> None:
        self.branch = min(self.k / self.depth, 0.5) ** 0.5
        self.skip = (1 - self.branch**2) ** 0.5

    @classmethod
    def alpha(cls, depth: int) -> float:
        return (1 - min(cls.k / depth, 0.5)) ** 0.5

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return self.skip * x + self.branch * G(norm(x))


class Looped(Scheme, name="looped", label="Looped", paper="arXiv:2606.18524", static=True):
    """x <- x + lambda / (n sqrt(L)) G(LN(x)).  Wang et al. 2026, arXiv:2606.18524.

    L layers have parameters of their own (`model.unique_layers`) and are run n = N/L times.  Sums
    of n equal updates grow as n, sums over L different ones as sqrt(L).  Without repeated layers
    n = 1, L = N.  The paper's step is one residual block; here it is each sublayer.  Layers of a
    prelude and a coda have the same factor and do not count in N.
    """

    final_norm = True
    scale: Annotated[float, Field(gt=0, description="lambda")] = 1.0

    def setup(self, parts: Parts) -> None:
        unique = self.place.unique_layers or self.depth
        looped = self.depth - self.place.prelude_layers - self.place.coda_layers
        self.factor = self.scale * unique**0.5 / looped

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return torch.add(x, G(norm(x)), alpha=self.factor)


class ProRes(Scheme, name="pro_res", label="ProRes", paper="arXiv:2603.05369", static=True):
    """x <- x + a_t G(LN(x)), a_t = min(1, t/(l ramp_steps)).  Chen et al. 2026, arXiv:2603.05369.

    Progressive residual warm-up: t counts the finished steps, as in the authors' code.  So the
    first step trains with a = 0, and step s with (s - 1)/(l ramp_steps).  Layer l takes l times as
    long as the first one, and the last reaches 1 after N ramp_steps.  The paper uses 1000, and 500
    for 96 layers or more.  F_0 is measured with a = 0, the model update after a step with the a of
    that step.  The paper also applies this factor to Post-LN, DeepNorm, Sandwich-LN and LayerNorm
    Scaling; here it applies to Pre-LN.
    """

    final_norm = True
    ramp_steps: Annotated[int, Field(ge=1, description="steps until a_t of layer 1 is 1")] = 1000
    ramp: Tensor

    def setup(self, parts: Parts) -> None:
        self.register_buffer("ramp", torch.zeros(()), persistent=False)

    def at_step(self, step: int) -> None:
        finished = max(step - 1, 0)
        self.ramp.fill_(min(1.0, finished / (self.layer_index * self.ramp_steps)))

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return x + self.ramp * G(norm(x))


class LAuReL(Scheme, name="laurel", label="LAuReL-LR", paper="arXiv:2411.07501", static=True):
    """x <- x + B A x + G(LN(x)), A (rank, d) and B (d, rank) trained, B = 0 at the start.

    Menghani et al. 2024, arXiv:2411.07501, section 2.2 (the low-rank version): around every
    sublayer the residual stream also passes a trained linear map; it starts as Pre-LN.  A starts
    with A_ji = 1/sqrt(rank d) where i mod rank = j, and 0 elsewhere, as for the paper's language
    models (section 3.3), whose rank is 4 and 64.  The difference from that is stored as `down`; B
    is `up`.  The paper's weights of x and G, bounded by a function that it leaves open, are not
    implemented.
    """

    final_norm = True
    extra_streams = 2
    rank: Annotated[int, Field(ge=1, description="of the map beside the identity")] = 4
    begin: Tensor

    def setup(self, parts: Parts) -> None:
        d, rank = parts.d_model, self.rank
        ones = torch.arange(d) % rank == torch.arange(rank)[:, None]
        self.register_buffer("begin", ones / (rank * d) ** 0.5, persistent=False)
        self.add_per_sublayer("down", lambda: parameter(rank, d, role="scheme", start="zero"))
        self.add_per_sublayer("up", lambda: parameter(d, rank, role="scheme", start="zero"))

    @classmethod
    def extra_flops(cls, sizes: StackSizes) -> int:
        """Return the FLOPs of B A x."""
        return 2 * 2 * cls.rank * sizes.sublayers * sizes.numbers

    def residual(self, x: Tensor, G: Sublayer, norm: Norm, *, down: Tensor, up: Tensor) -> Tensor:
        return x + F.linear(F.linear(x, self.begin + down), up) + G(norm(x))


class WithoutNorm(Scheme, registered=False):
    """A scheme without norms."""

    families = FAMILIES
    norms_per_sublayer = 0
    normalised = False


class ReZero(WithoutNorm, name="rezero", label="ReZero", paper="arXiv:2003.04887", static=True):
    """x <- x + a G(x), a = 0 at the start.  Bachlechner et al. 2020, arXiv:2003.04887, section 3.

    The sublayers of a layer share one trained scalar a; there is no norm.
    """

    def setup(self, parts: Parts) -> None:
        self.scale = parameter(1, role="scheme", start="zero")

    def residual(self, x: Tensor, G: Sublayer) -> Tensor:
        return x + self.scale * G(x)


class SkipInit(
    WithoutNorm, name="skip_init", label="SkipInit", paper="arXiv:2002.10444", static=True
):
    """x <- x + a G(x), a = `start` (0) at the start.  De and Smith 2020, arXiv:2002.10444.

    Each sublayer has one trained scalar, at the end of its branch; there is no norm.
    """

    start: Annotated[float, Field(description="where the scalars start")] = 0.0

    def setup(self, parts: Parts) -> None:
        self.add_per_sublayer("scale", lambda: parameter(1, role="scheme", start=self.start))

    def residual(self, x: Tensor, G: Sublayer, *, scale: Tensor) -> Tensor:
        return x + scale * G(x)


class TFixup(
    WithoutNorm, name="t_fixup", label="T-Fixup", paper="Huang et al. 2020, ICML", static=True
):
    """x <- x + G(x), v, o, w1, w2 started at 0.67 N^(-1/4).  Huang et al. 2020, ICML.

    There is no norm.  The paper needs no warm-up, and its code uses lr sqrt(4000/(4000 + t - 1))
    (train.schedule: inverse_sqrt, warmup_steps: 0, decay_period: 4000).  In a decoder of M layers
    that reads an encoder these matrices start at (9M)^(-1/4), also in cross-attention.  The
    token table starts at (9N)^(-1/4), as in the authors' code, where both sides share it.  That
    code starts q, k and v as under 'model.init.qkv: packed' and multiplies v by sqrt(2); with
    'packed', this gain does the same.
    """

    families = "encoder", "encoder_decoder"
    merges = False  # (9M)^(-1/4) is for three sublayers

    @classmethod
    def gain(cls, role: str, layer: int, depth: int, *, config: Config | None = None) -> float:
        if role == "embedding":
            return (9 * depth) ** -0.25
        start = 0.67 * depth**-0.25 if cls.place.side == "encoder" else (9 * depth) ** -0.25
        if config is not None and config.model.init.qkv == "packed" and role in ("v", "cross_v"):
            start *= 2**0.5
        return start if role in VALUE_PATH else 1.0

    def residual(self, x: Tensor, G: Sublayer) -> Tensor:
        return x + G(x)


class ScalarBias(nn.Module):
    """y <- y + c, c a trained scalar that starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = parameter(1, role="scheme", start="zero")

    def forward(self, y: Tensor) -> Tensor:
        return y + self.bias


class Fixup(WithoutNorm, name="fixup", label="Fixup", paper="arXiv:1901.09321", static=True):
    """x <- x + s G(x + c) + c', W_o = W_2 = 0 at the start.  Zhang et al. 2019, arXiv:1901.09321.

    The trained scalars are a multiplier s for each branch (start 1) and a bias (start 0) before
    every matrix, before the activation and after the last matrix.  The paper's classifier starts at
    0 too; here the configuration chooses the head.  The other matrices start at L^(-1/(2m - 2)),
    given L branches of m matrices: w1 at L^(-1/2), and q, k, v at L^(-1/6).  L is 2N; with a
    decoder 2N + 3M, or 2N + 2M if its attention is merged.

    The authors' Transformer starts q, k and v as under 'model.init.qkv: packed', and in
    cross-attention at 12^(-1/6) at every depth.  It has no biases in linear maps and no scalar
    before W_o or after the last matrix.  Each of its stacks ends in one more shift, with a
    multiplier in the encoder.
    """

    def setup(self, parts: Parts) -> None:
        crosses = ("before_cross_out",) if "cross_attention" in self.sublayers else ()
        for name in ("before_out", "before_activation", "after_activation", *crosses):
            self.slots[name] = ScalarBias()
        self.add_per_sublayer("scalars", lambda: parameter(3, role="scheme", start="zero"))

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        family, _, N, M, sublayers, *_ = cls.place
        branches = 2 * N + sublayers * M if family == "encoder_decoder" else 2 * depth
        name = role.removeprefix("cross_")
        powers = {"q": -1 / 6, "k": -1 / 6, "v": -1 / 6, "w1": -1 / 2}
        return 0.0 if name in ("o", "w2") else branches ** powers.get(name, 0.0)

    def residual(self, x: Tensor, G: Sublayer, *, scalars: Tensor) -> Tensor:
        into, scale, out = scalars.unbind()  # scale stores s - 1, so that all three start at 0
        return x + (1 + scale) * G(x + into) + out
