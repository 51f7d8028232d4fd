"""Schemes whose attention also reads a tensor from the attention of the layer before."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from deepstack.config import StackSizes
from deepstack.parameters.role import parameter
from deepstack.schemes.norms import in_fp32
from deepstack.schemes.scheme import Norm, Parts, Scheme, Stream, Sublayer


class AttentionStream(Scheme, registered=False):
    """A scheme whose stream is x and a tensor from one attention to that of the next layer."""

    def enter(self, x: Tensor) -> Stream:
        return x, None

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        (now, before), (attention, feed_forward) = x, sublayers
        passed_on: list[Tensor] = []

        def attend(z: Tensor) -> Tensor:
            y, tensor = attention(z, before=before)
            passed_on.append(tensor)
            return y

        (of_attention,), (of_feed_forward,) = self.norm_functions
        now = self.residual(now, attend, of_attention)
        return self.residual(now, feed_forward, of_feed_forward), passed_on[0]

    def leave(self, stream: Stream, norm: Norm | None) -> Tensor:
        return super().leave(stream[0], norm)


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

    v: (batch, head, seq, d_head).  a and b: trained numbers, or constants.
    """

    def __init__(self, mixes: bool, a: float, b: float, learnable: bool) -> None:
        super().__init__()
        self.mixes, self.a, self.b = mixes, a, b
        self.learnable = learnable
        if learnable:
            self.of_first = parameter(1, role="scheme", start=a)
            self.of_own = parameter(1, role="scheme", start=b)

    def forward(self, own: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        first = own if before is None else before
        if before is None or not self.mixes:
            return own, first
        if self.learnable:
            return self.of_first * first + self.of_own * own, first
        return self.a * first + self.b * own, first


class ResFormer(
    AttentionStream, name="res_former", label="ResFormer", paper="arXiv:2410.17897", static=True
):
    """x <- x + A(LN(x)), v_l <- a v_1 + b v_l in A, x <- x + F(LN(x)).  Zhou et al. 2024.

    Value residual learning, arXiv:2410.17897, section 3: Pre-LN whose attention mixes the layer's
    values with those of the first layer, before the softmax weights apply to them.  The first
    layer keeps its values.  a = b = 1/2, constants, as in the authors' code (Identity-ResFormer).

    learnable: each layer trains its a and b, which start at `first` and `own`
    (Learnable-ResFormer).  first, own: a and b; 2 and 1 in Constant-ResFormer.  last: the number of
    last layers that mix, 0 for all; in Sparse-ResFormer the last 3 of 8, with a = 5 and b = 1.
    Secondary sources report these three variants; the authors' code has only constants of 1/2.
    With first = 1 and own = 0 all layers share v_1: SVFormer, which has no W_v in the other layers;
    here they exist but have no effect.
    """

    final_norm = True
    extra_streams = 1
    learnable: Annotated[bool, Field(description="a and b are trained")] = False
    first: Annotated[float, Field(description="a, of the first layer's values")] = 0.5
    own: Annotated[float, Field(description="b, of the layer's own values")] = 0.5
    last: Annotated[int, Field(ge=0, description="layers that mix, at the end; 0: all")] = 0

    def setup(self, parts: Parts) -> None:
        mixes = not self.last or self.layer_index > self.depth - self.last
        mixed = MixedValues(mixes and self.layer_index > 1, self.first, self.own, self.learnable)
        self.slots["mixed_values"] = mixed

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return x + G(norm(x))
