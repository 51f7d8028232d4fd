"""A looped stack into whose every loop the prelude's output is injected."""

import math

import torch.nn.functional as F
from torch import Tensor

from deepstack.config import StackSizes
from deepstack.schemes.parts import Parts, StackPosition
from deepstack.schemes.role import parameter
from deepstack.schemes.scheme import Norm, Scheme, Stream, Sublayer

# exp(-softplus(DELTA)) is sqrt(1/5), the share of h that a loop keeps at the start.
DELTA = math.log(math.expm1(math.log(5) / 2))


class Parcae(Scheme, name="parcae", label="Parcae", paper="arXiv:2604.12946", static=True):
    """h <- exp(-D e^a) h + D B LN(e) before each loop, x <- x + G(LN(x)).  Prairie et al. 2026.

    arXiv:2604.12946.  The equation and its start are those of the authors' code
    (sandyresearch/parcae, `parcae_lm/modules/injection.py`): D = softplus(d), e is the output of
    the prelude (`model.prelude_layers`), and h the state that the layers of a loop
    (`model.unique_layers`) read and write as x.  Products with exp(-D e^a) and D are by coordinate;
    a and d are trained vectors (d_model), B is a trained matrix.  At the start a = 0, B = I, stored
    as its difference from I, and exp(-D) = sqrt(1/5).  The factor on h is below 1 for all a and d.
    Weight decay applies to none of them.

    The first loop begins with h = 0, where the published models draw a normal h.  The number of
    loops is constant, and the authors' linear map between loop and coda is left out.  Each layer
    holds a, d, B and a norm, of which the first layer of the loop uses its own.
    """

    final_norm = True

    def setup(self, parts: Parts) -> None:
        d = parts.d_model
        self.injection_norm = parts.norm()
        self.injection_a = parameter(d, role="scheme", start="zero")
        self.injection_d = parameter(d, role="scheme", start=DELTA)
        self.injection_map = parameter(d, d, role="scheme", start="zero")
        first, last = self.place.prelude_layers, self.depth - self.place.coda_layers
        at = self.layer_index - 1 - first
        length = self.place.unique_layers or last - first
        self.begins_loop = 0 <= at < last - first and at % length == 0
        self.is_first = at == 0

    @classmethod
    def loops(cls, depth: int) -> int:
        """Return how many loops a stack has."""
        place: StackPosition = cls.place
        looped = depth - place.prelude_layers - place.coda_layers
        return looped // (place.unique_layers or looped)

    @classmethod
    def extra_memory(cls, sizes: StackSizes) -> int:
        """Return the bytes of LN(e), B LN(e), h and its decayed form at each loop."""
        return 5 * cls.loops(sizes.depth) * sizes.stream

    @classmethod
    def extra_flops(cls, sizes: StackSizes) -> int:
        """Return the FLOPs of B LN(e) at each loop."""
        return 2 * cls.loops(sizes.depth) * sizes.d_model * sizes.numbers

    def enter(self, x: Tensor) -> Stream:
        return x, x

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        h, e = self.inject(*x)
        return super().layer(h, *sublayers), e

    def pass_over(self, x: Stream) -> Stream:
        return self.inject(*x)

    def inject(self, h: Tensor, e: Tensor) -> Stream:
        """Return the state with which the layer begins, and e."""
        if not self.begins_loop:
            return h, e
        step = F.softplus(self.injection_d)
        e = h if self.is_first else e
        known = self.injection_norm(e)
        written = step * (known + F.linear(known, self.injection_map))
        if self.is_first:
            return written, e
        return (-step * self.injection_a.exp()).exp() * h + written, e

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return x + G(norm(x))
