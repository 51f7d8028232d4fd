"""DeepNorm's relatives: other solutions of its condition, and a mistake worth a name.

The condition, for one SGD step on the weight matrices: 2N (v^2 + w^2) / alpha^2 = 1, v and w the
gains of the value path (Wang et al. 2022, arXiv:2203.00555, section 4.3).  `deepnorm_power` is the
curve of its solutions with v = w; the others read the bound in another way.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from deepstack.schemes.post_norm import VALUE_PATH
from deepstack.schemes.scheme import Norm, Optim, Parts, Scheme, Sublayer


class DeepNormAdam(
    Scheme, name="deepnorm_adam", label="DeepNorm (Adam)", paper="kexue.fm/8978", static=True
):
    """x <- LN(alpha x + G(x)), alpha = (2N)^(1/2).  Su 2022, kexue.fm/archives/8978.

    The same bound under Adam, whose update of a weight does not shrink with its gradient: alpha =
    (2N)^(1/2), beta = (2N)^(-1/2) on v, o, w1, w2.  GLM-130B uses this alpha in another wiring.
    """

    @classmethod
    def alpha(cls, depth: int) -> float:
        return (2 * depth) ** (1 / 2)

    @classmethod
    def beta(cls, depth: int) -> float:
        return (2 * depth) ** (-1 / 2)

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        return cls.beta(depth) if role in VALUE_PATH else 1.0

    def post_scale(self) -> float:
        return self.alpha(self.depth)

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return norm(torch.add(G(x), x, alpha=self.alpha(self.depth)))


class DeepNormTight(
    Scheme, name="deepnorm_tight", label="DeepNorm (tight)", paper="kexue.fm/8978", static=True
):
    """x <- LN(alpha x + G(x)), alpha = (2N)^(1/4), beta = (2N)^(-1/4).  Su 2022, kexue.fm/8978.

    What 2N beta^2 / alpha^2 = 1 gives with 1/alpha = beta, beta^2 standing where DeepNet's
    condition has v^2 + w^2: the paper's alpha with a beta that is larger by sqrt(2).
    """

    @classmethod
    def alpha(cls, depth: int) -> float:
        return (2 * depth) ** (1 / 4)

    @classmethod
    def beta(cls, depth: int) -> float:
        return (2 * depth) ** (-1 / 4)

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        return cls.beta(depth) if role in VALUE_PATH else 1.0

    def post_scale(self) -> float:
        return self.alpha(self.depth)

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return norm(torch.add(G(x), x, alpha=self.alpha(self.depth)))


class DeepNormPower(
    Scheme, name="deepnorm_power", label="DeepNorm (power)", paper="arXiv:2203.00555", static=True
):
    """x <- LN(alpha x + G(x)), alpha = (2N)^power, beta = alpha / (4N)^(1/2).  arXiv:2203.00555.

    Any point of the curve 2N (2 beta^2) / alpha^2 = 1; power 1/4 is DeepNorm itself.
    """

    def __init__(
        self,
        layer: int,
        depth: int,
        parts: Parts,
        *,
        power: Annotated[float, Field(ge=0, le=1, description="1/4 is DeepNorm")] = 0.25,
    ) -> None:
        super().__init__(layer, depth, parts)
        self.coefficient = self.alpha(depth, power=power)

    @classmethod
    def alpha(cls, depth: int, *, power: float = 0.25) -> float:
        return (2 * depth) ** power

    @classmethod
    def beta(cls, depth: int, *, power: float = 0.25) -> float:
        return cls.alpha(depth, power=power) / (4 * depth) ** 0.5

    @classmethod
    def gain(cls, role: str, layer: int, depth: int, *, power: float = 0.25) -> float:
        return cls.beta(depth, power=power) if role in VALUE_PATH else 1.0

    def post_scale(self) -> float:
        return self.coefficient

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return norm(torch.add(G(x), x, alpha=self.coefficient))


# With which power of N an update of size eta moves F: one step of Adam from initialisation.
ADAM_GROWTH = {role: 1 / 2 for role in ("q", "k", "v", "o", "w1", "w2", "w3")} | {
    "bias": 3 / 4,
    "norm_gain": 1.0,
    "norm_bias": 1.0,
}


class DeepNormRates(
    Scheme,
    name="deepnorm_rates",
    label="DeepNorm (rates by depth)",
    paper="none: derived here",
    static=True,
):
    """x <- LN(alpha x + G(x)), alpha = (2N)^(1/4); learning rates fall with N.  Derived here.

    DeepNorm's condition makes one SGD step on the weight matrices move F alike at every depth.
    Under Adam an update of size eta moves each entry of a parameter by about eta, whatever its
    gradient.  What that does to F is added up over 2N sublayers whose residual path keeps a
    disturbance as it is, so that with alpha = (2N)^(1/4) and beta = (8N)^(-1/4)

        matrices   2N sqrt(v^2 + w^2) / alpha = 2N sqrt(2) beta / alpha eta    ~ N^(1/2) eta
        biases     2N / alpha eta, that of an output; beta less for the others   ~ N^(3/4) eta
        norms      2N eta: gain and bias move the stream itself                ~ N eta
        tables     eta: x_0 is moved once                                     ~ eta

    so the learning rate of each role is multiplied by its power of base/N, and all of it moves F
    alike at every depth, as at N = base, where nothing is changed.  Measured with roles trained
    apart, one step of Adam, N from 6 to 500, three seeds: 0.49 (v, o), 0.50 (w1, w2), 0.72 (bias),
    1.01 (norm_gain, norm_bias), -0.02 (tables).  Queries and keys move F a fiftieth of what values
    do at N = 500, and are treated like the other matrices; so is a gate's w3, which the derivation
    does not know and which was not measured apart.  The rates of SGD stay.
    """

    def __init__(
        self,
        layer: int,
        depth: int,
        parts: Parts,
        *,
        base: Annotated[int, Field(ge=1, description="depth at which nothing is scaled")] = 6,
    ) -> None:
        super().__init__(layer, depth, parts)

    @classmethod
    def alpha(cls, depth: int) -> float:
        return (2 * depth) ** (1 / 4)

    @classmethod
    def beta(cls, depth: int) -> float:
        return (8 * depth) ** (-1 / 4)

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        return cls.beta(depth) if role in VALUE_PATH else 1.0

    @classmethod
    def optim(cls, role: str, depth: int, *, base: int = 6, optimizer: str = "adamw") -> Optim:
        if optimizer == "sgd":
            return Optim()
        return Optim(lr=(base / depth) ** ADAM_GROWTH.get(role, 0.0))

    def post_scale(self) -> float:
        return self.alpha(self.depth)

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return norm(torch.add(G(x), x, alpha=self.alpha(self.depth)))


class DeepNormRuntimeBeta(
    Scheme,
    name="deepnorm_runtime_beta",
    label="DeepNorm, beta at run time",
    paper="none: a common mistake",
    static=True,
):
    """x <- LN(alpha x + G(beta x)), which is not DeepNorm.  A mistake found in tutorials.

    beta, which should scale how matrices start, multiplies the sublayer's input in every forward
    pass instead, and matrices start with gain 1.  q and k are scaled too, so that logits get
    beta^2; the branch starts at beta and not beta^2; and the factor stays for all of training.
    """

    @classmethod
    def alpha(cls, depth: int) -> float:
        return (2 * depth) ** (1 / 4)

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        factor = (8 * self.depth) ** (-1 / 4)
        return norm(torch.add(G(factor * x), x, alpha=self.alpha(self.depth)))
