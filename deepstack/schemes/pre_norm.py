"""Schemes that normalise what a sublayer reads: the stream itself is never rescaled."""

from __future__ import annotations

from torch import Tensor, nn

from deepstack.schemes.scheme import Scheme, Sublayer


class PreLN(Scheme, name="pre_ln", label="Pre-LN", paper="arXiv:2002.04745"):
    """x <- x + G(LN(x)).  Xiong et al. 2020, arXiv:2002.04745, Table 1.

    Matrices start Xavier with gain 1.  The stack ends in a final norm, which the paper requires
    before the prediction layer.
    """

    final_norm = True

    def residual(self, x: Tensor, G: Sublayer, norm: nn.Module) -> Tensor:
        return x + G(norm(x))
