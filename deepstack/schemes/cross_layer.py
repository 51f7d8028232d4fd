"""Schemes whose layers read the outputs of earlier layers."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from deepstack.config import StackSizes
from deepstack.schemes.norms import in_fp32, in_full_precision
from deepstack.schemes.parts import Parts
from deepstack.schemes.pre_norm import PreLN
from deepstack.schemes.role import parameter
from deepstack.schemes.scheme import Norm, Scheme, Stream, Sublayer


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
        return self.mixed((*history, self.output_norm(y)))

    def mixed(self, history: tuple[Tensor, ...]) -> Stream:
        """Return the next layer's input, and the history that ends with this layer's output."""
        weights = self.weights[: len(history)] + 1 / len(history)
        with in_full_precision(history[-1]):
            return torch.tensordot(weights, torch.stack(history), dims=1), history

    def layer_output(self, before: Stream, after: Stream) -> Tensor:
        return after[1][-1]

    def set_layer_output(self, before: Stream, output: Tensor) -> Stream:
        return self.mixed((*before[1], output))


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
        return self.mixed((*history, y))

    def mixed(self, history: tuple[Tensor, ...]) -> Stream:
        y = history[-1]
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

    def layer_output(self, before: Stream, after: Stream) -> Tensor:
        """Return the sum of the layer's v in each block that it adds to, (batch, seq, v)."""
        (h, part, done), (_, last, done_after) = before, after
        sums = [*done_after[len(done) :], *(() if last is None else (last,))]
        if sums and part is not None:
            sums[0] = sums[0] - part
        empty = 1 + sum(self.completes[:-1]) - len(sums)  # blocks to which it adds nothing
        return torch.cat([*sums, *[torch.zeros_like(h)] * empty], dim=-1)

    def set_layer_output(self, before: Stream, output: Tensor) -> Stream:
        values = list(output.split(before[0].shape[-1], dim=-1))
        stream, parts = before, len(self.completes)
        for i in range(parts):
            # sublayers of one block have one sum, which the last of them adds
            v = values.pop(0) if self.completes[i] or i + 1 == parts else None
            stream = self.after(i, stream, v)
        return stream

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
        now, first, *_ = x
        return self.set_layer_output(x, super().layer(self.r * now + self.s * first, *sublayers))

    def pass_over(self, x: Stream) -> Stream:
        return self.set_layer_output(x, x[0])

    def set_layer_output(self, before: Stream, output: Tensor) -> Stream:
        """Return the stream after this layer, which may be the one that keeps x_m."""
        _, first, *middle = before
        if self.backout and self.layer_index == self.depth // 2 + 1:
            middle = [output]
        return output, first, *middle

    def leave(self, stream: Stream, norm: Norm | None) -> Tensor:
        x, _, *middle = stream
        return super().leave(x - self.backout * middle[0] if middle else x, norm)
