"""Schemes that combine Pre-LN and Post-LN."""

from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from deepstack.schemes.parts import FAMILIES, Parts
from deepstack.schemes.scheme import Norm, Scheme, Stream, Sublayer
from deepstack.schemes.two_streams import TwoStreams


class MixLN(Scheme, name="mix_ln", label="Mix-LN", paper="arXiv:2412.13795", static=True):
    """x <- LN(x + G(x)) for l <= share N, else x <- x + G(LN(x)).  Li et al. 2024, 2412.13795.

    Post-LN in the first floor(share N) layers, Pre-LN in the others; the stack has a final norm.
    """

    final_norm = True
    share: Annotated[float, Field(ge=0, le=1, description="of the layers: Post-LN")] = 0.25

    def setup(self, parts: Parts) -> None:
        # 0.29 * 100 is a little less than 29.
        self.is_post = self.layer_index <= round(self.share * self.depth, 9)

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return norm(x + G(x)) if self.is_post else x + G(norm(x))


class HybridNorm(
    Scheme, name="hybrid_norm", label="HybridNorm", paper="arXiv:2503.04598", static=True
):
    """y = LN(x + A(x)) with normed q, k, v, x <- y + F(y).  Zhuo et al. 2025, arXiv:2503.04598.

    Queries, keys and values are normed head by head; the attention's input is not normed.  The norm
    after the attention's addition feeds the feed-forward and its residual path.  The stack has a
    final norm.  The paper's norm is RMS.
    """

    final_norm = True
    norms_per_sublayer = 0

    def setup(self, parts: Parts) -> None:
        self.between = parts.norm()
        for name in ("q", "k", "v"):
            self.slots[name] = parts.norm(parts.d_model // parts.n_heads)

    def layer(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        attention, feed_forward = sublayers
        return self.residual(self.between(self.residual(x, attention)), feed_forward)

    def residual(self, x: Tensor, G: Sublayer) -> Tensor:
        return x + G(x)


class ResiDual(
    TwoStreams, name="residual", label="ResiDual", paper="arXiv:2304.14802", static=True
):
    """x <- LN(x + f), r <- r + s f, f = G(x); F = x + LN(r).  Xie et al. 2023, arXiv:2304.14802.

    Two streams: Post-LN's x and a Pre-LN-like sum r of all branches, r_0 = s x_0.
    """

    families = FAMILIES
    final_norm = True
    s: Annotated[
        float, Field(gt=0, description="keeps r in the range of fp16; LN takes it out")
    ] = 1.0

    def enter(self, x: Tensor) -> Stream:
        return x, self.s * x

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        now, r = x
        for G, (norm,) in zip(sublayers, self.norm_functions, strict=True):
            f = G(now)
            now, r = norm(now + f), torch.add(r, f, alpha=self.s)
        return now, r

    def leave(self, stream: Stream, norm: Any) -> Tensor:
        x, r = stream
        return x + norm(r)


class SiameseNorm(
    TwoStreams, name="siamese_norm", label="SiameseNorm", paper="arXiv:2602.08064", static=True
):
    """x <- LN(x), u = G(LN(x + LN(y))), x <- x + u/sqrt(2l), y <- y + u; F = LN(LN(x) + LN(y)).

    Li et al. 2026, arXiv:2602.08064: the same sublayers read and write two streams, both x_0 at
    first.  Every sublayer norms x as in Post-LN, and y is a sum as in Pre-LN.  This follows
    the authors' code for DeiT and DiT (`Block` of github.com/Qwen-Applications/SiameseNorm).  Their
    code for OLMo has HybridNorm's norms in its attention instead of the one around x + LN(y).

    Every norm has its own parameters.  The three norms of F belong to the stack.
    """

    final_norm = True
    stream_norms = 2
    norms_per_sublayer = 3
    extra_streams = 4
    share: Tensor

    def setup(self, parts: Parts) -> None:
        self.register_buffer(
            "share", torch.tensor((2 * self.layer_index) ** -0.5), persistent=False
        )

    def enter(self, x: Tensor) -> Stream:
        return x, x

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        now, y = x
        for G, norms in zip(sublayers, self.norm_functions, strict=True):
            outputs: list[Tensor] = []
            now = self.residual(now, partial(keep_output, G, outputs), *norms, y=y)
            y = y + outputs[0]
        return now, y

    def residual(
        self, x: Tensor, G: Sublayer, of_x: Norm, of_y: Norm, of_both: Norm, *, y: Tensor
    ) -> Tensor:
        x = of_x(x)
        return x + self.share * G(of_both(x + of_y(y)))

    def leave(self, stream: Stream, norm: Norm | None) -> Tensor:
        x, y = stream
        return super().leave(x + y, norm)


def keep_output(G: Sublayer, outputs: list[Tensor], z: Tensor) -> Tensor:
    """Return G(z), and append it to `outputs`."""
    outputs.append(G(z))
    return outputs[-1]
