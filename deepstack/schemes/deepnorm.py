"""DeepNorm, and its variants with other coefficients."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from deepstack.config import Config
from deepstack.config.roles import MATRICES
from deepstack.schemes.parts import FAMILIES, Parts
from deepstack.schemes.scheme import Norm, Optim, Scheme, Sublayer

VALUE_PATH = ("v", "o", "w1", "w2", "cross_v", "cross_o")
"""The matrices of the value path; q and k only determine the attention weights."""


class DeepNorm(Scheme, name="deepnorm", label="DeepNorm", paper="arXiv:2203.00555", static=True):
    """x <- LN(alpha x + G(x)), alpha = (2N)^(1/4).  Wang et al. 2022, arXiv:2203.00555, Figure 2.

    | family          | stack   | alpha                    | beta                      |
    |-----------------|---------|--------------------------|---------------------------|
    | encoder         |         | (2N)^(1/4)               | (8N)^(-1/4)               |
    | decoder         |         | (2M)^(1/4)               | (8M)^(-1/4)               |
    | encoder_decoder | encoder | 0.81 (N^4 M)^(1/16)      | 0.87 (N^4 M)^(-1/16)      |
    | encoder_decoder | decoder | (3M)^(1/4)               | (12M)^(-1/4)              |

    The matrices v, o, w1 and w2 start with gain beta, also in cross-attention; q and k start
    with gain 1 (Figure 2 of the paper).  So beta affects the initialisation alone.  The constant
    alpha is not trained.  There is no final norm.
    """

    families = FAMILIES
    merges = False  # the table counts three sublayers in a layer of a decoder that reads an encoder

    def setup(self, parts: Parts) -> None:
        self.coefficient = self.alpha(self.depth)

    @classmethod
    def alpha(cls, depth: int) -> float:
        family, side, N, M, *_ = cls.place
        if family != "encoder_decoder":
            return (2 * depth) ** (1 / 4)
        return 0.81 * (N**4 * M) ** (1 / 16) if side == "encoder" else (3 * M) ** (1 / 4)

    @classmethod
    def beta(cls, depth: int) -> float:
        family, side, N, M, *_ = cls.place
        if family != "encoder_decoder":
            return (8 * depth) ** (-1 / 4)
        return 0.87 * (N**4 * M) ** (-1 / 16) if side == "encoder" else (12 * M) ** (-1 / 4)

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        return cls.beta(depth) if role in VALUE_PATH else 1.0

    def post_scale(self) -> float:
        return self.coefficient

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        # torch.add(a, b, alpha=c) is a + c * b in one pass over memory.
        return norm(torch.add(G(x), x, alpha=self.coefficient))


class Variant(DeepNorm, registered=False):
    """DeepNorm without the coefficients of an encoder with a decoder.

    The condition for one SGD step on the weight matrices is 2N (v^2 + w^2) / alpha^2 = 1.  Here v
    and w are the gains of the value path (arXiv:2203.00555, section 4.3).  `deepnorm_power` is the
    curve of its solutions with v = w; the others interpret the bound otherwise.
    """

    families = ("encoder", "decoder")
    merges = True


class DeepNormAdam(
    Variant, name="deepnorm_adam", label="DeepNorm (Adam)", paper="kexue.fm/8978", static=True
):
    """x <- LN(alpha x + G(x)), alpha = (2N)^(1/2).  Su 2022, kexue.fm/archives/8978.

    The same bound under Adam, whose update of a weight does not shrink with its gradient: alpha =
    (2N)^(1/2), beta = (2N)^(-1/2) on v, o, w1, w2.  GLM-130B uses this alpha with other residual
    connections.
    """

    @classmethod
    def alpha(cls, depth: int) -> float:
        return (2 * depth) ** (1 / 2)

    @classmethod
    def beta(cls, depth: int) -> float:
        return (2 * depth) ** (-1 / 2)


class DeepNormTight(
    Variant, name="deepnorm_tight", label="DeepNorm (tight)", paper="kexue.fm/8978", static=True
):
    """x <- LN(alpha x + G(x)), alpha = (2N)^(1/4), beta = (2N)^(-1/4).  Su 2022, kexue.fm/8978.

    The solution of 2N beta^2 / alpha^2 = 1 with 1/alpha = beta.  DeepNet's condition has v^2 + w^2
    in the place of beta^2; so alpha is the paper's, and beta is larger by sqrt(2).
    """

    @classmethod
    def beta(cls, depth: int) -> float:
        return (2 * depth) ** (-1 / 4)


class DeepNormPower(
    Variant, name="deepnorm_power", label="DeepNorm (power)", paper="arXiv:2203.00555", static=True
):
    """x <- LN(alpha x + G(x)), alpha = (2N)^power, beta = alpha / (4N)^(1/2).  arXiv:2203.00555.

    The points of the curve 2N (2 beta^2) / alpha^2 = 1; power 1/4 is DeepNorm itself.
    """

    power: Annotated[float, Field(ge=0, le=1, description="1/4 is DeepNorm")] = 0.25

    @classmethod
    def alpha(cls, depth: int) -> float:
        return (2 * depth) ** cls.power

    @classmethod
    def beta(cls, depth: int) -> float:
        return cls.alpha(depth) / (4 * depth) ** 0.5


# The power of N with which an update of size eta moves F, for one Adam step from initialisation.
ADAM_GROWTH = dict.fromkeys(MATRICES, 1 / 2) | {
    "bias": 3 / 4,
    "norm_gain": 1.0,
    "norm_bias": 1.0,
}


class DeepNormRates(
    Variant,
    name="deepnorm_rates",
    label="DeepNorm (rates by depth)",
    paper="none: derived here",
    static=True,
):
    """x <- LN(alpha x + G(x)), alpha = (2N)^(1/4); learning rates fall with N.  Derived here.

    With DeepNorm's condition, one SGD step on the weight matrices moves F equally at every depth.
    Under Adam an update of size eta moves each entry of a parameter by about eta, whatever its
    gradient.  The effects on F add up over 2N sublayers, whose residual path keeps a perturbation
    unchanged.  With alpha = (2N)^(1/4) and beta = (8N)^(-1/4), F moves by

        matrices   2N sqrt(v^2 + w^2) / alpha = 2N sqrt(2) beta / alpha eta    ~ N^(1/2) eta
        biases     2N / alpha eta for output biases; the others: times beta   ~ N^(3/4) eta
        norms      2N eta: gain and bias move the stream itself                ~ N eta
        tables     eta: x_0 moves once                                        ~ eta

    The learning rate of each role is multiplied by its power of base/N, so that every role moves F
    equally at every depth; at N = base nothing changes.  Measured powers, each role trained alone
    for one Adam step, N from 6 to 500, three seeds: 0.49 (v, o), 0.50 (w1, w2), 0.72 (bias),
    1.01 (norm_gain, norm_bias), -0.02 (tables).  At N = 500 queries and keys move F by a fiftieth
    of the effect of values; they are treated like the other matrices.  So is a gate's w3, which
    the derivation omits and which was not measured alone.  The rates of SGD are unchanged.
    """

    base: Annotated[int, Field(ge=1, description="depth at which nothing is scaled")] = 6

    @classmethod
    def optim(cls, role: str, depth: int, *, config: Config | None = None) -> Optim:
        if config is not None and config.train.optimizer == "sgd":
            return Optim()
        return Optim(lr=(cls.base / depth) ** ADAM_GROWTH.get(role, 0.0))


class DeepNormRuntimeBeta(
    Scheme,
    name="deepnorm_runtime_beta",
    label="DeepNorm, beta at run time",
    paper="none: a common mistake",
    static=True,
):
    """x <- LN(alpha x + G(beta x)), which is not DeepNorm.  A mistake found in tutorials.

    beta should scale the initial matrices.  Instead it multiplies the sublayer's input in every
    forward pass, and matrices start with gain 1.  So q and k are scaled too, and logits by beta^2;
    the branch starts at beta and not beta^2; and the factor remains during all of training.
    """

    @classmethod
    def alpha(cls, depth: int) -> float:
        return (2 * depth) ** (1 / 4)

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        factor = (8 * self.depth) ** (-1 / 4)
        return norm(torch.add(G(factor * x), x, alpha=self.alpha(self.depth)))
