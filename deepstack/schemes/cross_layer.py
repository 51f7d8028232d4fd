"""Schemes whose layers read values of earlier layers: outputs, logits or attention values."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from deepstack.config import StackSizes
from deepstack.schemes.norms import in_fp32, in_full_precision
from deepstack.schemes.pre_norm import PreLN
from deepstack.schemes.role import parameter
from deepstack.schemes.scheme import Norm, Parts, Scheme, Stream, Sublayer


class DLCL(PreLN, name="dlcl", label="DLCL", paper="arXiv:1906.01787", static=True):
    """x_{l+1} = sum over k <= l of W_k LN(y_k), y_l = PreLN(x_l).  Wang et al. 2019, 1906.01787.

    y_l is the output of layer l, a Pre-LN layer, and y_0 the embedding; every y_k has its own norm.
    W, trained, starts as the mean, 1/(l + 1) each; it is stored as its difference from that.
    x_1 = LN(y_0), and a norm follows x_{N+1}.  The paper also trains a weight W_0^(1) of that
    LN(y_0), and the authors' code applies no norm to y_0.  Layer l reads l tensors: time and memory
    grow as N^2, and a compiler sees no two equal layers.
    """

    uniform = False
    entry_norm = True

    def setup(self, parts: Parts) -> None:
        self.output_norm = parts.norm()
        self.weights = parameter(self.depth + 1, role="scheme", start="zero")

    @classmethod
    def extra_memory(cls, sizes: StackSizes) -> int:
        return cls.stacked(sizes, cls.read_by_all(sizes.depth))

    @classmethod
    def extra_flops(cls, sizes: StackSizes) -> int:
        """Return the FLOPs of the weighted sums of all layers."""
        return 2 * cls.read_by_all(sizes.depth) * sizes.numbers

    @classmethod
    def read_by_all(cls, depth: int) -> int:
        """Return how many outputs all layers read together."""
        return depth * (depth + 3) // 2

    @classmethod
    def stacked(cls, sizes: StackSizes, states: int) -> int:
        """Return the bytes of the states that all layers stack; a replayed step has gradients."""
        return (1 + sizes.replayed) * states * sizes.stream

    def enter(self, x: Tensor) -> Stream:
        return x, (x,)

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        return self.after(super().layer(x[0], *sublayers), x[1])

    def pass_over(self, x: Stream) -> Stream:
        return self.after(*x)

    def after(self, y: Tensor, history: tuple[Tensor, ...]) -> Stream:
        """Return the next layer's input, and the history with the output y, (batch, seq, d)."""
        history = (*history, self.output_norm(y))
        weights = self.weights[: len(history)] + 1 / len(history)
        with in_full_precision(y):
            return torch.tensordot(weights, torch.stack(history), dims=1), history


class DenseFormer(
    DLCL, name="dense_former", label="DenseFormer", paper="arXiv:2402.02622", static=True
):
    """x_{l+1} = sum over k <= l of W_lk y_k, y_l = PreLN(x_l).  Pagliardini et al. 2024.

    arXiv:2402.02622, section 3: DLCL without norms of the y_k.  y_l is the output of layer l, a
    Pre-LN layer, and y_0 the embedding.  W, trained, starts as Pre-LN: W_ll = 1, the others 0; it
    is stored as its difference from that.  The stack has a final norm.

    dilation: layers read only y_l, y_{l-k}, y_{l-2k}, …, k the dilation.
    period: a layer whose number it does not divide passes y_l on unchanged.  The authors advise 4
        and 5 for deep stacks.  Time and memory grow as N^2 / (dilation * period); a compiler sees
        no two equal layers.
    """

    families = ("encoder", "decoder")
    entry_norm = False
    dilation: Annotated[int, Field(ge=1, description="read every so many-th layer")] = 1
    period: Annotated[int, Field(ge=1, description="mix after every so many-th layer")] = 1

    def setup(self, parts: Parts) -> None:
        self.weights = parameter(self.depth // self.dilation + 1, role="scheme", start="zero")

    @classmethod
    def extra_memory(cls, sizes: StackSizes) -> int:
        return cls.stacked(sizes, 1 + cls.read_by_all(sizes.depth))

    @classmethod
    def read_by_all(cls, depth: int) -> int:
        return sum(layer // cls.dilation + 1 for layer in range(cls.period, depth + 1, cls.period))

    def after(self, y: Tensor, history: tuple[Tensor, ...]) -> Stream:
        history = (*history, y)
        if self.layer_index % self.period:
            return y, history
        read = history[self.layer_index % self.dilation :: self.dilation]
        with in_full_precision(y):
            mixed = torch.tensordot(self.weights[: len(read)], torch.stack(read), dims=1)
        return y + mixed, history


class AttentionResiduals(
    Scheme, name="attn_res", label="Attention residuals", paper="arXiv:2603.15031", static=True
):
    """h = sum over i of a_i v_i, a = softmax_i(wᵀ RMS(v_i)), v_0 = x_0, v_i = G(LN(h)).

    Kimi Team 2026, arXiv:2603.15031, section 3.  There is no residual sum.  Each sublayer reads h,
    a weighted mean of x_0 and the outputs of all sublayers before it, and so does the final norm.
    The weights differ by token; each reader trains a vector w (d_model).  w = 0 at the start: equal
    weights.  RMS(v) = v / sqrt(mean(v^2) + 1e-6); the gain of the authors' norm is part of w.

    blocks: the stack is divided into this many blocks of nearly equal length.  A block's v_i is the
    sum of its outputs, in the current block so far (the paper's Block AttnRes).  The paper uses 8.
    With 0 every sublayer is a block (Full AttnRes); time and memory grow as N^2.
    """

    uniform = False
    final_norm = True
    blocks: Annotated[int, Field(ge=0, description="runs of sublayers; 0: one each")] = 8

    def setup(self, parts: Parts) -> None:
        count = len(parts.sublayers)
        first, total = (self.layer_index - 1) * count, self.depth * count
        complete = [self.complete_blocks(first + i, total) for i in range(count + 1)]
        self.completes = [complete[i + 1] > complete[i] for i in range(count)]
        # the query of the next reader: the sublayer after, or at the end the final norm
        d = parts.d_model
        self.add_per_sublayer("query", lambda: parameter(d, role="scheme", start="zero"))

    @classmethod
    def complete_blocks(cls, passed: int, total: int) -> int:
        """Return how many blocks are complete after some of all sublayers of a stack."""
        return passed * min(cls.blocks or total, total) // total

    @classmethod
    def extra_memory(cls, sizes: StackSizes) -> int:
        """Return the bytes of all values weighed, also normed; a replayed sum has gradients."""
        full = not cls.blocks or cls.blocks >= sizes.sublayers
        sources = sizes.sublayers * ((sizes.sublayers if full else cls.blocks) + 3) // 2
        return (3 + 3 * (sizes.replayed and full)) * sources * sizes.stream

    @classmethod
    def extra_flops(cls, sizes: StackSizes) -> int:
        """Return the FLOPs of wᵀ RMS(v) and of the weighted sum, at every sublayer."""
        total = sizes.sublayers
        # x_0, the complete blocks and the current one, which may be complete after this sublayer
        sources = sum(2 + cls.complete_blocks(before, total) for before in range(total))
        return 4 * sources * sizes.numbers

    def enter(self, x: Tensor) -> Stream:
        return x, None, (x,)

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        for i, (G, norms) in enumerate(zip(sublayers, self.norm_functions, strict=True)):
            x = self.after(i, x, self.residual(x[0], G, *norms))
        return x

    def pass_over(self, x: Stream) -> Stream:
        for i in range(len(self.sublayers)):
            x = self.after(i, x, None)
        return x

    def after(self, i: int, stream: Stream, v: Tensor | None) -> Stream:
        """Return the stream after sublayer i of the layer, whose output is v, or None.

        The stream is a tuple: h; the sum of the current block, None while it is empty; the complete
        blocks, x_0 the first.
        """
        _, part, done = stream
        if v is not None:
            part = in_fp32(v) if part is None else part + v
        if self.completes[i] and part is not None:
            part, done = None, (*done, part)
        values = torch.stack(done if part is None else (*done, part), dim=2)
        return weighed(values, self.per_sublayer("query")[i]), part, done

    def residual(self, x: Tensor, G: Sublayer, norm: Norm) -> Tensor:
        """Return v, given h (here x)."""
        return G(norm(x))


def weighed(values: Tensor, w: Tensor) -> Tensor:
    """Return sum_i a_i v_i, a = softmax_i(wᵀ RMS(v_i)); values: (batch, seq, n, d), w: (d,)."""
    with in_full_precision(values):
        keys = torch.rms_norm(values, w.shape, eps=1e-6)
        weights = torch.softmax(torch.matmul(keys, w), dim=-1)
        return (weights[..., None] * values).sum(dim=2)


class X0Lambdas(
    PreLN,
    name="x0_lambdas",
    label="x0 lambdas",
    paper="Jordan et al. 2024, modded-nanogpt",
    static=True,
):
    """x <- r x + s x_0 before each layer, then x <- x + G(LN(x)), r = 1 and s = 0 at the start.

    Jordan et al. 2024, github.com/KellerJordan/modded-nanogpt (`lambdas` of its `Block`): Pre-LN in
    which every layer can add the embedding again.  Each layer trains the numbers r and s.  A norm
    is applied to x_0 (LN(x_0), without a gain in the authors' code), and another ends the stack.

    r_first, start: r and s of layer 1 at the start.
    r_last, start_last: of layer N, linear in l between them (null: as layer 1).  nanochat
        (github.com/karpathy/nanochat, `init_weights`) starts r at 1.15 to 1.05 and s at 0.2 to
        0.05.
    backout: F = LN(x_N - backout x_m), m = N/2 + 1, rounded down; nanochat trains this number from
        0.2, and here it is constant.  Both codes use separate learning rates for r and s.
    """

    families = ("encoder", "decoder")
    entry_norm = True
    extra_streams = 2
    start: Annotated[float, Field(description="where s of layer 1 starts")] = 0.0
    start_last: Annotated[
        float | None, Field(description="where s of layer N starts; null: as layer 1")
    ] = None
    r_first: Annotated[float, Field(description="where r of layer 1 starts")] = 1.0
    r_last: Annotated[
        float | None, Field(description="where r of layer N starts; null: as layer 1")
    ] = None
    backout: Annotated[float, Field(description="share of x_m, m = N/2 + 1, taken from x_N")] = 0.0

    def setup(self, parts: Parts) -> None:
        self.r = parameter(1, role="scheme", start=self.at(self.r_first, self.r_last))
        self.s = parameter(1, role="scheme", start=self.at(self.start, self.start_last))

    def at(self, first: float, last: float | None) -> float:
        """Return the value in this layer of a line from layer 1 to layer N."""
        share = (self.layer_index - 1) / max(self.depth - 1, 1)
        return first if last is None else first + (last - first) * share

    def enter(self, x: Tensor) -> Stream:
        return (x, x, x) if self.backout else (x, x)

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        now, first, *middle = x
        now = super().layer(self.r * now + self.s * first, *sublayers)
        if self.backout and self.layer_index == self.depth // 2 + 1:
            middle = [now]
        return now, first, *middle

    def leave(self, stream: Stream, norm: Norm | None) -> Tensor:
        x, _, *middle = stream
        return super().leave(x - self.backout * middle[0] if middle else x, norm)


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
