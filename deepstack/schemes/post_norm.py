"""Schemes that normalise after the addition: the stream itself passes through every norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepstack.schemes.scheme import Scheme, Sublayer


class PostLN(Scheme, name="post_ln", label="Post-LN", paper="arXiv:1706.03762"):
    """x <- LN(x + G(x)).  Vaswani et al. 2017, arXiv:1706.03762, section 3.1.

    Matrices start Xavier with gain 1.  No final norm: every sublayer already ends in one.
    """

    def residual(self, x: Tensor, G: Sublayer, norm: nn.Module) -> Tensor:
        return norm(x + G(x))


class DeepNorm(Scheme, name="deepnorm", label="DeepNorm", paper="arXiv:2203.00555"):
    """x <- LN(alpha x + G(x)), alpha = (2N)^(1/4).  Wang et al. 2022, arXiv:2203.00555, Table 1.

    Encoder-only coefficients: alpha = (2N)^(1/4), and an initialisation gain beta = (8N)^(-1/4)
    on v, o, w1 and w2, while q and k start with gain 1 (Figure 2 of the paper).  beta is a gain of
    the initialisation and nothing else; alpha is a constant and is not trained.  No final norm.
    """

    @classmethod
    def alpha(cls, depth: int) -> float:
        return (2 * depth) ** (1 / 4)

    @classmethod
    def beta(cls, depth: int) -> float:
        return (8 * depth) ** (-1 / 4)

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        return cls.beta(depth) if role in ("v", "o", "w1", "w2") else 1.0

    def residual(self, x: Tensor, G: Sublayer, norm: nn.Module) -> Tensor:
        # torch.add(a, b, alpha=c) is a + c * b in one pass over memory.
        return norm(torch.add(G(x), x, alpha=self.alpha(self.depth)))
