"""Schemes without a norm, whose branches start at or near zero."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from deepstack.parameters.role import parameter
from deepstack.schemes.post_norm import VALUE_PATH
from deepstack.schemes.scheme import FAMILIES, Parts, Scheme, Sublayer


class ReZero(Scheme, name="rezero", label="ReZero", paper="arXiv:2003.04887", static=True):
    """x <- x + a G(x), a = 0 at the start.  Bachlechner et al. 2020, arXiv:2003.04887, section 3.

    The sublayers of a layer share one trained scalar a; there is no norm.
    """

    families = FAMILIES
    norms_per_sublayer = 0
    normalised = False

    def setup(self, parts: Parts) -> None:
        self.scale = parameter(1, role="scheme", start="zero")

    def residual(self, x: Tensor, G: Sublayer) -> Tensor:
        return x + self.scale * G(x)


class SkipInit(Scheme, name="skip_init", label="SkipInit", paper="arXiv:2002.10444", static=True):
    """x <- x + a G(x), a = `start` (0) at the start.  De and Smith 2020, arXiv:2002.10444.

    Each sublayer has one trained scalar, at the end of its branch; there is no norm.
    """

    families = FAMILIES
    norms_per_sublayer = 0
    normalised = False
    start: Annotated[float, Field(description="where the scalars start")] = 0.0

    def setup(self, parts: Parts) -> None:
        self.add_per_sublayer("scale", lambda: parameter(1, role="scheme", start=self.start))

    def residual(self, x: Tensor, G: Sublayer, *, scale: Tensor) -> Tensor:
        return x + scale * G(x)


class TFixup(Scheme, name="t_fixup", label="T-Fixup", paper="Huang et al. 2020, ICML", static=True):
    """x <- x + G(x), v, o, w1, w2 started at 0.67 N^(-1/4).  Huang et al. 2020, ICML.

    There is no norm.  The paper needs no warm-up, and its code uses lr sqrt(4000/(4000 + t - 1))
    (train.schedule: inverse_sqrt, warmup_steps: 0, decay_period: 4000).  In a decoder of M layers
    that reads an encoder these matrices start at (9M)^(-1/4), those of cross-attention too.  The
    token table starts at (9N)^(-1/4), as in the authors' code, where both sides share it.  That
    code starts q, k and v as under 'model.init.qkv: packed' and multiplies v by sqrt(2); with
    'packed', this gain does the same.
    """

    families = "encoder", "encoder_decoder"
    merges = False  # (9M)^(-1/4) is for three sublayers
    norms_per_sublayer = 0
    normalised = False

    @classmethod
    def gain(cls, role: str, layer: int, depth: int, *, qkv: str = "separate") -> float:
        if role == "embedding":
            return (9 * depth) ** -0.25
        start = 0.67 * depth**-0.25 if cls.place.side == "encoder" else (9 * depth) ** -0.25
        if qkv == "packed" and role in ("v", "cross_v"):
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


class Fixup(Scheme, name="fixup", label="Fixup", paper="arXiv:1901.09321", static=True):
    """x <- x + s G(x + c) + c', W_o = W_2 = 0 at the start.  Zhang et al. 2019, arXiv:1901.09321.

    The trained scalars are a multiplier s for each branch (start 1) and a bias (start 0) before
    every matrix, before the activation and after the last matrix.  The paper's classifier starts at
    0 too; here the configuration chooses the head.  The other matrices start at L^(-1/(2m - 2)),
    given L branches of m matrices: w1 at L^(-1/2), and q, k, v at L^(-1/6).  L is 2N; with a
    decoder 2N + 3M, or 2N + 2M if its attention is merged.

    The authors' Transformer starts q, k and v as under 'model.init.qkv: packed', and those of
    cross-attention at 12^(-1/6) at every depth.  It has no biases in linear maps and no scalar
    before W_o or after the last matrix.  Each of its stacks ends in one more shift, with a
    multiplier in the encoder.
    """

    families = FAMILIES
    norms_per_sublayer = 0
    normalised = False

    def setup(self, parts: Parts) -> None:
        self.slots["before_out"] = ScalarBias()
        self.slots["before_activation"] = ScalarBias()
        self.slots["after_activation"] = ScalarBias()
        if "cross_attention" in self.sublayers:
            self.slots["before_cross_out"] = ScalarBias()
        self.add_per_sublayer("scalars", lambda: parameter(3, role="scheme", start="zero"))

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        branches, position = 2 * depth, cls.place
        if position.family == "encoder_decoder":
            branches = (
                2 * position.encoder_depth + position.decoder_sublayers * position.decoder_depth
            )
        name = role.removeprefix("cross_")
        powers = {"q": -1 / 6, "k": -1 / 6, "v": -1 / 6, "w1": -1 / 2}
        return 0.0 if name in ("o", "w2") else branches ** powers.get(name, 0.0)

    def residual(self, x: Tensor, G: Sublayer, *, scalars: Tensor) -> Tensor:
        into, scale, out = scalars.unbind()  # scale stores s - 1, so that all three start at 0
        return x + (1 + scale) * G(x + into) + out
