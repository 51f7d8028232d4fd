"""Schemes whose attention reads logits or values of earlier attentions."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from deepstack.config import StackSizes
from deepstack.schemes.norms import in_fp32
from deepstack.schemes.parts import Parts
from deepstack.schemes.role import parameter
from deepstack.schemes.scheme import Norm, Scheme, Stream, Sublayer


class AttentionStream(Scheme, registered=False):
    """A scheme whose stream is x and a tensor that each attention passes to the next one."""

    def enter(self, x: Tensor) -> Stream:
        return x, None

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        (now, passed_on), (attention, feed_forward) = x, sublayers

        def attend(z: Tensor) -> Tensor:
            nonlocal passed_on
            y: Tensor
            y, passed_on = attention(z, before=passed_on)
            return y

        return super().layer(now, attend, feed_forward), passed_on


class RunningLogits(nn.Module):
    """S_l = q kᵀ / sqrt(d_head) + S_{l-1}; the softmax takes S_l, or S_l / l.

    S: (batch, head, seq, seq), in fp32; S_l goes to the next layer.
    """

    share: Tensor

    def __init__(self, layer: int, mean: bool) -> None:
        super().__init__()
        self.mean = mean
        self.register_buffer("share", torch.tensor(1 / layer), persistent=False)

    def forward(self, own: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        total = in_fp32(own) if before is None else before + own
        return total * self.share if self.mean else total, total


class RealFormer(
    AttentionStream, name="real_former", label="RealFormer", paper="arXiv:2012.11747", static=True
):
    """x <- LN(x + A(x)), S_l = q kᵀ/sqrt(d_head) + S_{l-1} in A's softmax, x <- LN(x + F(x)).

    He et al. 2020, arXiv:2012.11747, section 3.  Post-LN with residual attention logits: S_l,
    (batch, head, seq, seq), is a sum over the layers so far, S_0 = 0.  A causal attention masks
    S_l before its softmax and passes it on unmasked.  No fused attention kernel returns its
    logits.  So every layer stores batch * heads * seq^2 numbers for S_l and as many for its
    softmax, and recomputation stores S_l with x at each boundary.

    mean: the softmax takes S_l / l.  The authors' code does so for 30 layers or more
    (`use_running_mean` in google-research/realformer); the paper's equation has the sum.
    """

    mean: Annotated[bool, Field(description="the mean of the logits, not their sum")] = False

    def setup(self, parts: Parts) -> None:
        self.slots["logits"] = RunningLogits(self.layer_index, self.mean)

    @classmethod
    def extra_memory(cls, sizes: StackSizes) -> int:
        """Return the bytes of logits and softmax in fp32: of every layer, and of two at work."""
        return 2 * (sizes.depth + 2) * sizes.batch * sizes.heads * sizes.seq**2 * 4

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return norm(x + G(x))


class MixedValues(nn.Module):
    """v_l <- a v_1 + b v_l for the layers that mix; v_1 goes to the next layer.

    v: (batch, head, seq, d_head).

    a and b: trained numbers, or constants.
    """

    def __init__(self, mixes: bool, a: float, b: float, learnable: bool) -> None:
        super().__init__()
        self.mixes = mixes
        self.of_first, self.of_own = (
            parameter(1, role="scheme", start=value) if learnable else value for value in (a, b)
        )

    def forward(self, own: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        if before is None:
            return own, own
        return self.of_first * before + self.of_own * own if self.mixes else own, before


class ResFormer(
    AttentionStream, name="res_former", label="ResFormer", paper="arXiv:2410.17897", static=True
):
    """x <- x + A(LN(x)), v_l <- a v_1 + b v_l in A, x <- x + F(LN(x)).  Zhou et al. 2024.

    Value residual learning, arXiv:2410.17897, section 3: Pre-LN whose attention mixes the layer's
    values with those of the first layer, before the softmax weights apply to them.  The first
    layer keeps its values.  a = b = 1/2, constants, as in the authors' code (Identity-ResFormer).

    learnable: each layer trains its a and b, which start at `first` and `own`
        (Learnable-ResFormer).
    first, own: a and b; 2 and 1 in Constant-ResFormer.
    last: the number of last layers that mix, 0 for all; in Sparse-ResFormer the last 3 of 8, with a
        = 5 and b = 1.  Secondary sources report these three variants; the authors' code has only
        constants of 1/2.  With first = 1 and own = 0 all layers share v_1: SVFormer, which has no
        W_v in the other layers; here they exist but have no effect.
    """

    final_norm = True
    extra_streams = 1
    learnable: Annotated[bool, Field(description="a and b are trained")] = False
    first: Annotated[float, Field(description="a, of the first layer's values")] = 0.5
    own: Annotated[float, Field(description="b, of the layer's own values")] = 0.5
    last: Annotated[int, Field(ge=0, description="layers that mix, at the end; 0: all")] = 0

    def setup(self, parts: Parts) -> None:
        mixes = self.layer_index > self.depth - (self.last or self.depth)
        self.slots["mixed_values"] = MixedValues(mixes, self.first, self.own, self.learnable)

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return x + G(norm(x))
