"""MUDD: every layer reads four sums of all earlier layers' outputs, with weights by token."""

from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from deepstack.base.errors import ConfigError
from deepstack.config import StackSizes
from deepstack.config.sizes import FP32
from deepstack.schemes.norms import in_full_precision
from deepstack.schemes.parts import Parts
from deepstack.schemes.role import parameter
from deepstack.schemes.scheme import Norm, Scheme, Stream, Sublayer


class NormedInputs(nn.Module):
    """z, (k, v) -> z, LN(k), LN(v): the inputs of queries, keys and values, each like z."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.norms = nn.ModuleList(parts.norm() for _ in range(2))

    def forward(self, z: Tensor, others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return z, *(norm(other) for norm, other in zip(self.norms, others, strict=True))


class MUDD(Scheme, name="mudd", label="MUDD", paper="arXiv:2502.12170", static=True):
    """x <- r + A(LN(q), LN(k), LN(v)), q, k, v, r: sum_j (b + W_2 GELU(W_1 RMS(x_l)))_j x_j.

    Xiao et al. 2025, arXiv:2502.12170 (multiway dynamic dense connections); then x <- x + F(LN(x)).
    x_l is the output of layer l, x_0 the embedding.  Layer l + 1 reads the four sums over j = 0 to
    l; each has a weight for each j and each token.  Layer 1 reads x_0 four times.  After the last
    layer there is one sum, which the final norm reads.  RMS(x) = x / sqrt(mean(x^2) + 1e-6).

    The starts are those of the authors' JAX code (Caiyun-AI/MUDDFormer, `layers/llama2.py`); their
    PyTorch code only loads weights.  b is 1 for j = l and 0 for the others, W_2 is 0, and W_1 is
    normal with variance 1/d_model.  So the stack starts as Pre-LN.  The difference of b from its
    start is stored.  Weight decay applies to none of them.

    dynamic: the sums have the weights W_2 GELU(W_1 RMS(x_l)) too; without, b alone.
    multiway: there are four sums; without, one, which the layer reads as Pre-LN reads x.
    norms: the sums are of LN(x_j), with a norm for each j, and x_l is added to them.  The sum in r
        is normed too, by a norm whose gain starts at 0.001, and RMS is a norm with a gain
        (`mudd_prenorm` and `mudd_postnorm` of the authors' training configuration; their PyTorch
        code has neither).
    multiple: the rows of W_1, 4 (l + 1), become the next larger multiple of this number, as in the
        authors' code; 0: they do not.

    The authors' layer 1 norms x_0 once for q, k and v; here it has three norms, as other layers.
    The authors' feed-forwards grow from half of the width in layer 1 to 1.5 times in layer N; here
    all layers have equal widths.  GELU is exact, as in their PyTorch code; their JAX code takes
    flax's approximation.  Each layer stores W_1, W_2 and b at the size of the last layer's, W_2
    three times as large as its used part on average.  They grow as N^3, other memory and time as
    N^2.  A compiler sees no two equal layers.
    """

    uniform = False
    final_norm = True
    dynamic: Annotated[bool, Field(description="weights depend on the token, not only on b")] = True
    multiway: Annotated[bool, Field(description="a sum each for q, k, v and r, not one")] = True
    norms: Annotated[bool, Field(description="norms of the x_j and of the sum for r")] = False
    multiple: Annotated[int, Field(ge=0, description="of the rows of W_1; 0: 4 (l + 1) rows")] = 64

    def setup(self, parts: Parts) -> None:
        self.ways, read, rows = self.way_count(), self.depth + 1, self.rows(self.depth)
        self.b = parameter(self.ways, read, role="scheme", start="zero")
        if self.dynamic:
            self.w_1 = parameter(rows, parts.d_model, role="scheme", start="table")
            self.w_2 = parameter(self.ways, read, rows, role="scheme", start="zero")
        if self.multiway:
            self.slots["inputs"] = NormedInputs(parts)
        if self.norms:
            self.first_norm, self.output_norm = parts.norm(), parts.norm()
            self.sum_norm = parts.norm()
            if self.dynamic:
                self.weight_norm = parts.norm()
            gain: Any = self.sum_norm.gain
            if gain is None:
                raise ConfigError(
                    "model.scheme_options.norms: found true and model.norm.gain: false, without "
                    "which there is no gain to start at 0.001; allowed with model.norm.gain=true",
                    key="model.scheme_options.norms",
                )
            gain.start = 0.001

    @classmethod
    def way_count(cls) -> int:
        """Return how many sums a layer reads."""
        return 4 if cls.multiway else 1

    @classmethod
    def rows(cls, layer: int) -> int:
        """Return the rows of W_1 that layer l uses."""
        rows = cls.way_count() * (layer + 1)
        return (rows // cls.multiple + 1) * cls.multiple if cls.multiple else rows

    @classmethod
    def extra_memory(cls, sizes: StackSizes) -> int:
        """Return the bytes of x_j and sums, and of the weights with gradients and Adam's moments.

        A replayed step keeps the gradients of the stacked x_j, and of every x_j before and after
        each addition.
        """
        N, ways = sizes.depth, cls.way_count()
        streams = (1 + 3 * sizes.replayed) * N * (N + 3) // 2 + (2 * ways + 3 * cls.norms) * N
        trained = N * cls.rows(N) * (sizes.d_model + ways * (N + 1)) * cls.dynamic
        tokens = sizes.batch * sizes.seq
        hidden = 2 * tokens * sum(map(cls.rows, range(1, N + 1))) * cls.dynamic
        return streams * sizes.stream + FP32 * (4 * trained + hidden)

    @classmethod
    def extra_flops(cls, sizes: StackSizes) -> int:
        """Return the FLOPs of W_1, of W_2 and of the sums, after every layer."""
        total = 0
        for layer in range(1, sizes.depth + 1):
            weights = (cls.way_count() if layer < sizes.depth else 1) * (layer + 1)
            rows = cls.rows(layer) * cls.dynamic
            total += rows * (sizes.d_model + weights) + weights * sizes.d_model
        return 2 * sizes.batch * sizes.seq * total

    def enter(self, x: Tensor) -> Stream:
        """Return r, q, k, v (or r alone), x_0, and the tuple of all x_j so far."""
        return (*[x] * self.way_count(), x, (x,))

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        r, *others, _, before = x
        (attention, feed_forward), ((norm,), (last,)) = sublayers, self.norm_functions
        read, *rest = others or [r]
        if rest:
            attention = partial(attention, before=tuple(rest))
        y = self.residual(r, attention, norm, read=read)
        return self.sums(before, self.residual(y, feed_forward, last, read=y))

    def residual(self, x: Tensor, G: Sublayer, norm: Norm, *, read: Tensor) -> Tensor:
        """Return x + G(LN(read)): the stream, given r (here x) and the sublayer's first input."""
        return x + G(norm(read))

    def sums(self, before: tuple[Tensor, ...], x: Tensor) -> Stream:
        """Return the stream after this layer, given all earlier x_j and x_l, its output."""
        normed = torch.rms_norm(x, x.shape[-1:], eps=1e-6) if self.dynamic else x
        outputs = (*before, x)
        if self.norms:
            normed = self.weight_norm(x) if self.dynamic else x
            before = (self.first_norm(before[0]),) if self.layer_index == 1 else before
            outputs = (*before, self.output_norm(x))
        ways, read = self.ways if self.layer_index < self.depth else 1, len(outputs)
        with in_full_precision(x):
            b = self.b[:ways, :read]
            if self.dynamic:
                rows = self.rows(self.layer_index)
                hidden = F.gelu(F.linear(normed, self.w_1[:rows]))
                w_2 = self.w_2[:ways, :read, :rows].flatten(0, 1)
                weights = F.linear(hidden, w_2).unflatten(-1, (ways, read)) + b
                added = torch.matmul(weights, torch.stack(outputs, dim=2)).unbind(2)
            else:
                added = torch.tensordot(b, torch.stack(outputs), dims=1).unbind()
        if self.norms:
            added = (self.sum_norm(added[0]), *added[1:])
        streams = [x + one for one in added] * (self.ways // ways)
        return (*streams, x, outputs)

    def pass_over(self, x: Stream) -> Stream:
        return self.sums(x[-1], x[0])

    def token_state(self, stream: Stream) -> Tensor:
        """Return r, q, k and v side by side, (batch, seq, 4 d_model), or r alone."""
        return torch.cat(stream[:-2], dim=-1)

    def set_token_state(self, stream: Stream, state: Tensor) -> Stream:
        return (*state.chunk(self.ways, dim=-1), *stream[-2:])

    def layer_output(self, before: Stream, after: Stream) -> Tensor:
        x: Tensor = after[-2]
        return x

    def set_layer_output(self, before: Stream, output: Tensor) -> Stream:
        return self.sums(before[-1], output)
