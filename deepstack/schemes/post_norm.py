"""Schemes that normalise after the addition."""

import math
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from deepstack.config.roles import MATRICES
from deepstack.schemes.deepnorm import VALUE_PATH
from deepstack.schemes.parts import FAMILIES, Parts
from deepstack.schemes.role import parameter
from deepstack.schemes.scheme import Norm, Scheme, Stream, Sublayer


class PostLN(Scheme, name="post_ln", label="Post-LN", paper="arXiv:1706.03762", static=True):
    """x <- LN(x + G(x)).  Vaswani et al. 2017, arXiv:1706.03762, section 3.1.

    Matrices start Xavier with gain 1.  There is no final norm: every sublayer ends in a norm.
    """

    families = FAMILIES

    def post_scale(self) -> float:
        return 1.0

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return norm(x + G(x))


class PostLNInit(
    PostLN, name="post_ln_init", label="Post-LN-init", paper="arXiv:2203.00555", static=True
):
    """x <- LN(x + G(x)), W_l started at 1/(N - l + 1).  Wang et al. 2022, arXiv:2203.00555.

    The paper's own baseline (section 3): Xavier, then the matrices of layer l divided by N - l + 1.
    So lower layers start smaller; in DS-Init, higher ones do.  The paper leaves open whether 'the
    weights of the l-th layer' are all matrices or, as in DeepNorm, the matrices of the value path;
    the option `matrices` chooses.
    """

    matrices: Annotated[
        Literal["all", "value_path"], Field(description="all six, or v, o, w1 and w2")
    ] = "all"

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        chosen = MATRICES if cls.matrices == "all" else VALUE_PATH
        return 1 / (depth - layer + 1) if role in chosen and layer else 1.0


class DSInit(PostLN, name="ds_init", label="DS-Init", paper="arXiv:1908.11365", static=True):
    """x <- LN(x + G(x)), W_l started at scale / l^exponent.  Zhang et al. 2019, arXiv:1908.11365.

    U(-g scale/sqrt(l), g scale/sqrt(l)), g = sqrt(6/(n_in + n_out)), for every matrix of layer l:
    Xavier's deviation times scale / sqrt(l) (the paper's distribution is 'model.init.distribution:
    xavier_uniform').  The authors' code scales the variance by l^(-1/2): exponent 0.25.
    """

    scale: Annotated[float, Field(gt=0, le=1, description="the paper's alpha")] = 1.0
    exponent: Annotated[
        float, Field(ge=0, le=1, description="0.5 as in the paper, 0.25 as in its code")
    ] = 0.5

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        return cls.scale * layer**-cls.exponent if role in MATRICES and layer else 1.0


class B2T(Scheme, name="b2t", label="B2T", paper="arXiv:2206.00330", static=True):
    """u = LN(x + A(x)), x <- LN(x + u + F(u)).  Takase et al. 2022, arXiv:2206.00330.

    Post-LN, A the attention and F the feed-forward, with the layer's input added again before its
    last norm (in a decoder, u is the stream after cross-attention).  The authors' code, but not the
    paper, also multiplies every matrix of the layers by N^(-1/2): the option `rescale`.
    """

    families = FAMILIES
    rescale: Annotated[bool, Field(description="start matrices at N^(-1/2), as the code")] = False

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        return depth**-0.5 if cls.rescale and role in MATRICES else 1.0

    def layer(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        u = x
        for G, (norm,) in zip(sublayers[:-1], self.norm_functions[:-1], strict=True):
            u = self.residual(u, G, norm, bottom=None)
        return self.residual(u, sublayers[-1], *self.norm_functions[-1], bottom=x)

    def residual(self, x: Tensor, G: Sublayer, norm: Norm, *, bottom: Tensor | None) -> Tensor:
        return norm(x + G(x)) if bottom is None else norm(bottom + x + G(x))


class Keel(Scheme, name="keel", label="KEEL", paper="arXiv:2601.19895", static=True):
    """x <- LN(alpha x + G(LN(x))), alpha = 2N.  arXiv:2601.19895, 'Post-LayerNorm Is Back'.

    alpha is the number of sublayers; the paper's norm is RMS.  The first layer has alpha = 1 and no
    outer norm after its attention.  Matrices start Xavier with gain 1.
    """

    norms_per_sublayer = 2  # inside the branch, and after the addition

    def setup(self, parts: Parts) -> None:
        self.is_first = self.layer_index == 1  # torch.compile compiles again for each index
        self.coefficient = 1.0 if self.is_first else self.alpha(self.depth)

    @classmethod
    def alpha(cls, depth: int) -> float:
        return 2.0 * depth

    def layer(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        (attention, feed_forward), (before, after) = sublayers, self.norm_functions
        x = self.residual(x, attention, *(before[:1] if self.is_first else before))
        return self.residual(x, feed_forward, *after)

    def residual(self, x: Tensor, G: Sublayer, inner: Norm, outer: Norm | None = None) -> Tensor:
        z = torch.add(G(inner(x)), x, alpha=self.coefficient)
        return z if outer is None else outer(z)


class BranchNorm(
    Scheme, name="branch_norm", label="BranchNorm", paper="arXiv:2305.02790", static=True
):
    """x <- LN(x + a_t G(x)), a_t = min(1, t/ramp_steps).  Liu et al. 2023, arXiv:2305.02790.

    The branch's weight grows; after the ramp this is Post-LN.  t counts steps from 1: the first
    step trains with 1/ramp_steps.  The authors' code is not public; theirs may start with t = 0, as
    ProRes does.  ramp_steps should lie well below train.steps; its default comes from a secondary
    source.  F_0 is measured with a_0 = 0, so ‖ΔF‖ contains the ramp.
    """

    families = FAMILIES
    ramp_steps: Annotated[int, Field(ge=1, description="steps until a_t is 1")] = 4000
    ramp: Tensor

    def setup(self, parts: Parts) -> None:
        self.register_buffer("ramp", torch.zeros(()), persistent=False)

    def at_step(self, step: int) -> None:
        self.ramp.fill_(min(1.0, step / self.ramp_steps))

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        return norm(x + self.ramp * G(x))


class Admin(Scheme, name="admin", label="Admin", paper="arXiv:2004.08249", static=True):
    """x <- LN(w * x + G(x)), w a trained vector.  Liu et al. 2020, arXiv:2004.08249, section 4.

    w (d_model) of sublayer i starts at sqrt(1 + sum over j < i of Var[G_j]), profiled on the first
    batch as in the authors' code (the paper's formula has no 1).  There r_1 = 1, w_i = r_i and
    r_{i+1} = sqrt(Var(w_i x) + Var(G_i(x))), variances over all numbers of the batch; a decoder
    starts again at 1.  The authors start q, k and v as under 'model.init.qkv: packed'.  At 100
    layers their w of sublayer 200 starts at 8.84; here at about 8.5 with packed and 10.9 with
    separate q, k, v.  `start` can choose a closed form of admin-torch, n the sublayers of the stack
    (2N): 'log' sqrt((n + 1)/ln(n + 1) - 1), 'one' sqrt(n), 'linear' 1 (its O(log n), O(1), O(n)).
    """

    families = FAMILIES
    start: Annotated[
        Literal["profiled", "log", "one", "linear"], Field(description="where w starts")
    ] = "profiled"

    def setup(self, parts: Parts) -> None:
        n = len(parts.sublayers) * self.depth
        forms = {"log": math.sqrt((n + 1) / math.log(n + 1) - 1), "one": math.sqrt(n)}
        start = forms.get(self.start, 1.0)
        self.add_per_sublayer("omega", lambda: parameter(parts.d_model, role="scheme", start=start))

    def residual(self, x: Tensor, G: Sublayer, norm: Norm, *, omega: Tensor) -> Tensor:
        return norm(omega * x + G(x))

    def calibrate(self, x: Stream, *sublayers: Sublayer, seen: dict[str, Any]) -> Stream:
        if self.start != "profiled":
            return self.layer(x, *sublayers)
        omegas = self.per_sublayer("omega")
        for G, (norm,), omega in zip(sublayers, self.norm_functions, omegas, strict=True):
            omega.fill_(seen.get("ratio", 1.0))
            f = G(x)
            seen["ratio"] = ((omega * x).var(correction=0) + f.var(correction=0)).sqrt()
            x = norm(omega * x + f)
        return x


class MVSplit(Scheme, name="mv_split", label="MV-Split", paper="arXiv:2605.06169", static=True):
    """x <- LN(x + b * (g - M g) + a * (M g - M x)), g = G(x), M the mean over the tokens.

    Lu 2026, arXiv:2605.06169 (Mean-Variance Split residuals), for diffusion Transformers of 1000
    layers.  The branch's deviation from its mean over the tokens is added with one trained vector,
    b (`centred`, 0.03 at the start).  The mean of the stream moves towards the branch's with
    another, a (`mean`, 0).
    As in the author's code (`dit.py` of github.com/erwold/mv-split), whose norm is RMS, there is a
    norm on x_0 and none at the end.  The mean is over a whole sequence, so there is no causal form.
    """

    families = ("encoder",)
    entry_norm = True
    extra_streams = 3
    mean: Annotated[float, Field(description="where a starts")] = 0.0
    centred: Annotated[float, Field(description="where b starts")] = 0.03

    def setup(self, parts: Parts) -> None:
        d = parts.d_model
        self.add_per_sublayer("mean", lambda: parameter(d, role="scheme", start=self.mean))
        self.add_per_sublayer("centred", lambda: parameter(d, role="scheme", start=self.centred))

    def residual(
        self, x: Tensor, G: Sublayer, norm: Norm, *, mean: Tensor, centred: Tensor
    ) -> Tensor:
        g = G(x)
        M_g, M_x = (y.mean(dim=1, keepdim=True) for y in (g, x))
        return norm(x + centred * (g - M_g) + mean * (M_g - M_x))
