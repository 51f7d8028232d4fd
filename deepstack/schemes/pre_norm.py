"""Pre-LN and its variants."""

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from deepstack.base.errors import ConfigError
from deepstack.schemes.norms import in_full_precision
from deepstack.schemes.parts import FAMILIES, Parts
from deepstack.schemes.role import parameter
from deepstack.schemes.scheme import Norm, Scheme, Sublayer


class PreLN(Scheme, name="pre_ln", label="Pre-LN", paper="arXiv:2002.04745", static=True):
    """x <- x + G(LN(x)).  Xiong et al. 2020, arXiv:2002.04745, Table 1.

    Matrices start Xavier with gain 1.  The stack ends in a final norm, which the paper requires
    before the prediction layer.
    """

    families = FAMILIES
    final_norm = True

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return x + G(norm(x))


class SubLN(PreLN, name="sub_ln", label="Sub-LN", paper="arXiv:2210.06423", static=True):
    """x <- x + W_out LN(phi(W_in LN(x))).  Wang et al. 2022, arXiv:2210.06423 (Magneto), Figure 2.

    Pre-LN with a second norm inside each sublayer: before W_o, over the concatenated heads, and
    before W_2, over d_ff.  The gains are sqrt(log(2N)) for v, o, w1, w2, and 1 for q and k.  With
    a decoder of M layers: sqrt(log(3M) log(2N) / 3) in the encoder, sqrt(log(3M)) in the decoder,
    whose cross-attention has no second norm and gain 1.
    """

    merges = False  # the gains count three sublayers in a layer of a decoder that reads an encoder

    def setup(self, parts: Parts) -> None:
        self.slots["before_out"] = parts.norm()
        self.slots["after_activation"] = parts.norm(parts.d_ff)

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        if role not in ("v", "o", "w1", "w2"):
            return 1.0
        family, side, N, M, *_ = cls.place
        if family != "encoder_decoder":
            return math.sqrt(math.log(2 * depth))
        decoder = math.log(3 * M)
        return math.sqrt(decoder * math.log(2 * N) / 3 if side == "encoder" else decoder)


class OrthogonalUpdate(
    PreLN,
    name="orthogonal_update",
    label="Orthogonal update",
    paper="arXiv:2505.11881",
    static=True,
):
    """x <- x + g - (<x, g> / (‖x‖² + 1e-6)) x, g = G(LN(x)).  Oh et al. 2025, arXiv:2505.11881.

    Pre-LN that adds the part of the branch orthogonal to x, token by token: the paper's
    feature-wise variant, as in the authors' code (github.com/BootsofLagrangian/ortho-residual).
    """

    families = ("encoder", "decoder")
    extra_streams = 2

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        g = G(norm(x))
        with in_full_precision(x):
            share = (x * g).sum(-1, keepdim=True) / (x.square().sum(-1, keepdim=True) + 1e-6)
            return x + g - share * x


class Delta(nn.Module):
    """beta = 2 sigmoid(w_b · c + b), v = 4 sigmoid(w_v · x + b_v), two numbers of each token.

    x, c: (batch, seq, d).  All four trained, 0 at the start: beta = 1 and v = 2.
    """

    def __init__(self, d: int) -> None:
        super().__init__()
        self.of_beta = parameter(d, role="scheme", start="zero")
        self.of_v = parameter(d, role="scheme", start="zero")
        self.biases = parameter(2, role="scheme", start="zero")

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Return beta and v, each (batch, seq, 1)."""
        beta = (c * self.of_beta).sum(-1, keepdim=True) + self.biases[0]
        v = (x * self.of_v).sum(-1, keepdim=True) + self.biases[1]
        return 2 * torch.sigmoid(beta), 4 * torch.sigmoid(v)


class DeepDelta(
    Scheme, name="deep_delta", label="Deep Delta", paper="arXiv:2601.00417", static=True
):
    """x <- x + beta (v - <k, x>) k, k = G(c)/‖G(c)‖, c = LN(x), beta in (0, 2).  Zhang et al. 2026.

    Deep Delta Learning, arXiv:2601.00417, with scalar values (d_v = 1), after the authors' code
    (`DDL-vdim1-gpt-mha-rope.py` of github.com/yifanzhang-pro/deep-delta-learning): the direction k
    of each sublayer's output replaces the component of x along it, by a share beta, with v.
    beta = 2 sigmoid(w_b · c + b) and v = 4 sigmoid(w_v · x + b_v).  ‖z‖ is sqrt(sum(z^2) + 1e-10).

    o and w2 start at 1/sqrt(N) of the other matrices, as in that code; k does not depend on it, and
    a step turns k sqrt(N) times as far.  w_b, w_v, b and b_v start at 0, so beta = 1 and v = 2; the
    code draws w_b and w_v from N(0, 1/(4 d)), and b_v from U(-1/sqrt(d), 1/sqrt(d)).  At this start
    the gradient of the embedding grows exponentially with depth: its norm is 3 at 10 layers, 2e7 at
    100 and 5e12 at 200 (d_model and d_ff 12, 2 sequences of 6 tokens, vocabulary 11, seed 0).
    """

    final_norm = True
    extra_streams = 3

    def setup(self, parts: Parts) -> None:
        self.add_per_sublayer("delta", lambda: Delta(parts.d_model))

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        return depth**-0.5 if role in ("o", "w2") else 1.0

    def residual(self, x: Tensor, G: Sublayer, norm: Norm, *, delta: Delta) -> Tensor:
        c = norm(x)
        g = G(c)
        with in_full_precision(x):
            k = g * torch.rsqrt(g.square().sum(-1, keepdim=True) + 1e-10)
            beta, v = delta(x, c)
            return x + beta * (v - (k * x).sum(-1, keepdim=True)) * k


class HeadScale(nn.Module):
    """y_h <- s_h y_h, where s_h starts at 1.  y: (batch, head, seq, d_head)."""

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.scale = parameter(n_heads, role="scheme", start="one")

    def forward(self, y: Tensor) -> Tensor:
        return y * self.scale[:, None, None]


class NormFormer(
    PreLN, name="norm_former", label="NormFormer", paper="arXiv:2110.09456", static=True
):
    """x <- x + LN(A(LN(x))), then x <- x + W_2 LN(phi(W_1 LN(x))).  arXiv:2110.09456, section 2.

    Pre-LN with a norm after the attention, one before W_2 (over d_ff), and a trained scale of every
    head, before W_o as in the paper (fairseq's code applies it after).  Shleifer et al. 2021.
    """

    families = ("encoder", "decoder")

    def setup(self, parts: Parts) -> None:
        self.after_attention = parts.norm()
        self.slots["heads"] = HeadScale(parts.n_heads)
        self.slots["after_activation"] = parts.norm(parts.d_ff)

    def layer(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        attention, feed_forward = sublayers
        return super().layer(x, lambda z: self.after_attention(attention(z)), feed_forward)


class PeriLN(Scheme, name="peri_ln", label="Peri-LN", paper="arXiv:2502.02732", static=True):
    """x <- x + LN(G(LN(x))), x_0 <- LN(x_0).  Kim et al. 2025, arXiv:2502.02732, section 3.

    Norms around every sublayer, one on the embedding and one at the end.  The paper's norm is RMS.
    """

    entry_norm = True
    final_norm = True
    norms_per_sublayer = 2

    def residual(self, x: Tensor, G: Sublayer, before: Norm, after: Norm) -> Tensor:
        return x + after(G(before(x)))


class SandwichLN(
    PeriLN, name="sandwich_ln", label="Sandwich-LN", paper="arXiv:2105.13290", static=True
):
    """x <- x + LN(G(LN(x))).  Ding et al. 2021, arXiv:2105.13290 (CogView), section 2.4.

    start: 'scaled' starts the output matrices o and w2 at 1/sqrt(2N) of the others, as the authors'
    code does; 'plain' starts all matrices with gain 1.  The norm after G removes this factor from
    the forward pass, but a step changes the smaller matrices sqrt(2N) times as much in proportion.
    """

    entry_norm = False
    start: Annotated[
        Literal["scaled", "plain"], Field(description="o and w2 at 1/sqrt(2N), or at 1")
    ] = "scaled"

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        return (2 * depth) ** -0.5 if cls.start == "scaled" and role in ("o", "w2") else 1.0


class ScaledPreLN(
    PreLN,
    name="pre_ln_scaled",
    label="Pre-LN, scaled start",
    paper="Radford et al. 2019",
    static=True,
):
    """x <- x + G(LN(x)), W_o and W_2 started at 1/sqrt(2N) of the others.  Radford et al. 2019.

    The initialisation of GPT-2 (section 2.3, where N counts the 2N sublayers) and of Megatron-LM
    (arXiv:1909.08053).  The sum of all branches then has the variance of one unscaled branch.
    GPT-2 draws from N(0, 0.02^2): `model.init.distribution: normal`.
    """

    families = ("encoder", "decoder")

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        return (2 * depth) ** -0.5 if role in ("o", "w2") else 1.0


class Parallel(Scheme, name="parallel", label="Parallel", paper="arXiv:2204.02311", static=True):
    """x <- x + A(LN(x)) + F(LN(x)), one LN for both.  Chowdhery et al. 2022, 2204.02311 (PaLM).

    Attention and feed-forward read the same input, as in GPT-J (Wang & Komatsuzaki 2021).  Sec. 2.
    """

    final_norm = True
    norms_per_sublayer = 0

    def setup(self, parts: Parts) -> None:
        self.before_both = parts.norm()

    def layer(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        z = self.before_both(x)
        for G in sublayers:
            x = self.residual(x, lambda _, G=G: G(z))
        return x

    def residual(self, x: Tensor, G: Sublayer) -> Tensor:
        return x + G(x)


class ResPostNorm(
    Scheme, name="res_post_norm", label="Res-post-norm", paper="arXiv:2111.09883", static=True
):
    """x <- x + LN(G(x)).  Liu et al. 2021, arXiv:2111.09883 (Swin Transformer V2), section 3.2.

    The norm is on the branch, after the sublayer; the sublayer's input is not normed.  OLMo 2
    (arXiv:2501.00656) does the same.  The stack has a final norm.

    start: the initial gain of these norms: 1 as in OLMo 2.  With 0, as in the code of Swin V2
    (`_init_respostnorm`), the stack starts as the identity.
    """

    final_norm = True
    start: Annotated[float, Field(ge=0, description="where the norms' gains start")] = 1.0

    def setup(self, parts: Parts) -> None:
        for (norm,) in self.per_sublayer("norms"):
            if norm.gain is not None:
                norm.gain.start = self.start
            elif self.start != 1:
                raise ConfigError(
                    f"model.scheme_options.start: found {self.start:g} and model.norm.gain: false, "
                    "without which there is no gain to start; allowed with model.norm.gain=true",
                    key="model.scheme_options.start",
                )

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return x + norm(G(x))
