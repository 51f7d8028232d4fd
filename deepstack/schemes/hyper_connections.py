"""Hyper-connections: several residual streams, or parts of one, mixed around every sublayer."""

import math
from collections.abc import Callable
from itertools import count
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from deepstack.base.errors import ConfigError
from deepstack.config import StackSizes
from deepstack.schemes.mixing import (
    CayleyMixing,
    KroneckerMixing,
    Mixing,
    PermutationMixing,
    SinkhornMixing,
)
from deepstack.schemes.norms import in_full_precision
from deepstack.schemes.parts import FAMILIES, Parts
from deepstack.schemes.role import parameter
from deepstack.schemes.scheme import Norm, Scheme, Stream, Sublayer

MIXINGS: dict[str, Callable[[int, int], Mixing]] = {
    "sinkhorn": SinkhornMixing,
    "identity": lambda n, iterations: Mixing(n),
    "permutations": lambda n, iterations: PermutationMixing(n),
    "kronecker": lambda n, iterations: KroneckerMixing(n),
    "cayley": lambda n, iterations: CayleyMixing(n),
}
"""The matrix A_r of mHC by the option `mixing`, given n and the iterations of Sinkhorn's."""


class Connections(nn.Module):
    """C(H) = C + [s_a, …, s_a, s_b] * tanh(LN(H) W); without `dynamic`, C.

    H: (n, batch, seq, w), n streams of width w; C(H): (n, batch, seq, k), or (n, 1, 1, k).  All
    columns but the last are A, the weights that mix the streams: new stream j is the sum over i of
    A[i, j] H[i].  The last one is B, the weight of the sublayer's output in each stream.

    static: C less [begin | 1], (n, 1, 1, k), 0 at the start.
    map: W transposed, (k, w), 0 at the start.
    scale_a, scale_b: s_a and s_b, 0.01 at the start.
    """

    begin: Tensor

    def __init__(self, begin: Tensor, width: int, parts: Parts, dynamic: bool) -> None:
        super().__init__()
        n, k = begin.shape[0], begin.shape[1] + 1
        start = torch.cat([begin, torch.ones(n, 1)], dim=1)
        self.register_buffer("begin", start.view(n, 1, 1, k), persistent=False)
        self.static = parameter(n, 1, 1, k, role="scheme", start="zero")
        self.dynamic = dynamic
        if dynamic:
            self.norm = parts.norm(width)
            self.map = parameter(k, width, role="scheme", start="zero")
            self.scale_a = parameter(1, role="scheme", start=0.01)
            self.scale_b = parameter(1, role="scheme", start=0.01)

    def forward(self, H: Tensor) -> tuple[Tensor, Tensor]:
        """Return A and B, (n, …, k - 1) and (n, …, 1)."""
        C = self.begin + self.static
        last = C.shape[-1] - 1
        if self.dynamic:
            s = torch.cat([self.scale_a.expand(last), self.scale_b])
            C = C + s * torch.tanh(torch.matmul(self.norm(H), self.map.t()))
        A, B = C.split([last, 1], dim=-1)
        return A, B


class ManyStreams(Scheme, registered=False):
    """A scheme of n streams, mixed around every sublayer by connections of their own.

    The stream is a tuple of H's first stream, for charts, and H, (n, batch, seq, d); z_l is H.
    """

    final_norm = True
    mixes_streams = True
    streams: Annotated[int, Field(ge=1, le=64, description="n, the number of streams")] = 4
    output_gain: Annotated[float, Field(gt=0, description="gain of o and w2")] = 1.0

    def setup(self, parts: Parts) -> None:
        k = count((self.layer_index - 1) * len(self.sublayers))
        self.add_per_sublayer(
            "connections", lambda: self.connections(next(k) % self.streams, parts)
        )

    def connections(self, k: int, parts: Parts) -> nn.Module:
        """Return the connections of a sublayer that mainly reads stream k at the start."""
        raise NotImplementedError

    @classmethod
    def gain(cls, role: str, layer: int, depth: int) -> float:
        return cls.output_gain if role in ("o", "cross_o", "w2") else 1.0

    @classmethod
    def extra_memory(cls, sizes: StackSizes) -> int:
        """Return the bytes of the streams: as they are, normed, mixed and added to."""
        return sizes.sublayers * 4 * cls.streams * sizes.stream

    @classmethod
    def extra_flops(cls, sizes: StackSizes) -> int:
        """Return the FLOPs of A H, and of the map from H to the connections."""
        each = cls.streams * (cls.streams + 1 + cls.mapped())
        return 2 * each * sizes.sublayers * sizes.numbers

    @classmethod
    def mapped(cls) -> int:
        """Return how many numbers the connections compute from each stream of a token."""
        raise NotImplementedError

    def enter(self, x: Tensor) -> Stream:
        return x, x.expand(self.streams, *x.shape)

    def token_state(self, stream: Stream) -> Tensor:
        return stream[1].movedim(0, -2).flatten(-2)

    def set_token_state(self, stream: Stream, state: Tensor) -> Stream:
        H = state.unflatten(-1, (self.streams, -1)).movedim(-2, 0)
        return H[0], H

    def layer(self, x: Stream, *sublayers: Sublayer) -> Stream:
        _, H = x
        every = self.per_sublayer("connections")
        for G, norms, connections in zip(sublayers, self.norm_functions, every, strict=True):
            A, B = connections(H)
            h, mixed = mix(A, H).split([1, len(H)])
            H = self.residual(h.squeeze(0), G, *norms, mixed=mixed, B=B)
        return H[0], H

    def residual(self, x: Tensor, G: Sublayer, norm: Norm, *, mixed: Tensor, B: Tensor) -> Tensor:
        """Return H, given h (here x) and the streams mixed by A_r, (n, batch, seq, d)."""
        return mixed + B * G(norm(x))

    def leave(self, stream: Stream, norm: Norm | None) -> Tensor:
        return super().leave(stream[1].sum(dim=0), norm)


class HyperConnections(
    ManyStreams,
    name="hyper_connections",
    label="Hyper-connections",
    paper="arXiv:2409.19606",
    static=True,
):
    """h = A_mᵀ H, H <- A_rᵀ H + Bᵀ G(LN(h)), H of n streams.  Zhu et al. 2024, arXiv:2409.19606.

    H (n, d) of a token is x_0 in every stream at first; at the end F = LN(the sum of all streams).
    A_m (n, 1), A_r (n, n) and B (1, n) of a sublayer, all trained, start as Pre-LN: A_m reads
    stream k mod n, k = 0, 1, … counting the sublayers of the stack, A_r = I and B = (1, …, 1).
    Every stream then equals x of Pre-LN and the sum is n x.  LN of n x equals LN of x but for its
    epsilon (not so for dynamic_tanh, which fixes no scale).

    dynamic: adds s tanh(LN(H) W) to each of them, W = 0 and s = 0.01 at the start, with a separate
    norm for each sublayer (section 2.3).  Weight decay applies to none of them; the authors decay
    W.  They also report matrices o and w2 that start scaled by sqrt(n).  The option `output_gain`
    sets this factor; the start then differs from Pre-LN's.

    Memory for the values between sublayers is n times as large, or 2 n + 1 times with the mixed
    streams.
    """

    families = FAMILIES
    dynamic: Annotated[
        bool, Field(description="connections depend on the streams, not only on training")
    ] = True

    @classmethod
    def mapped(cls) -> int:
        return (cls.streams + 2) * cls.dynamic

    def connections(self, k: int, parts: Parts) -> nn.Module:
        identity = torch.eye(self.streams)
        begin = torch.cat([identity[:, k, None], identity], dim=1)  # [A_m | A_r]
        return Connections(begin, parts.d_model, parts, self.dynamic)


class Constrained(nn.Module):
    """A_m = sigmoid(a), A_r = mixing(R), B = 2 sigmoid(b), z = [a | b | R] = s W RMS(vec H) + C.

    H: (n, batch, seq, d); a, b: n numbers a token; R: as many as the mixing has.  h = sum over
    streams i of A_m[i] H[i]; stream i becomes sum_j A_r[i, j] H[j] + B[i] G(LN(h)).
    RMS(z) = z / sqrt(mean(z^2) + 1e-6) over all n d numbers of a token.  C = begin + c.

    map: W, (n, 2 n + len R, d), 0 at the start; z[m] has the sum over streams i and coordinates e
        of W[i, m, e] RMS(vec H)[i, e].
    scale: s, one number for a, one for b and one for R (if there is an R), in this order, 0.01 at
        the start.
    bias: c, in the order [a | b | R], 0 at the start: the difference from `begin`, a constant.
        begin is 1 for stream k and -1 for the others, once for a and once for b, and then the
        mixing's R_0.  k = (2 (l - 1) + i) mod n in layer l = 1, 2, ... with sublayers i = 0 and 1.
    """

    begin: Tensor

    def __init__(self, k: int, n: int, parts: Parts, mixing: Mixing) -> None:
        super().__init__()
        one = torch.full((n,), -1.0)
        one[k] = 1.0
        begin = torch.cat([one, one, mixing.begin])
        self.register_buffer("begin", begin, persistent=False)
        self.bias = parameter(len(begin), role="scheme", start="zero")
        self.map = parameter(n, len(begin), parts.d_model, role="scheme", start="zero")
        self.scale = parameter(3 if len(mixing.begin) else 2, role="scheme", start=0.01)
        self.mixing = mixing

    def forward(self, H: Tensor) -> tuple[Tensor, Tensor]:
        """Return A = [A_m | A_rᵀ], (n, batch, seq, n + 1), and B, (n, batch, seq, 1)."""
        with in_full_precision(H):
            n, batch, seq, _ = H.shape
            rms = torch.rsqrt(H.square().mean(dim=(0, 3)) + 1e-6)
            mapped = torch.einsum("ibsd,ikd->kbs", H, self.map) * rms
            sizes = (n, n, len(self.begin) - 2 * n)
            scales = zip(torch.split(self.scale, 1), sizes, strict=False)
            s = torch.cat([one.expand(count) for one, count in scales])
            logits = s[:, None, None] * mapped + (self.begin + self.bias)[:, None, None]
            a, b, R = logits.split(sizes)
            A_r = self.mixing(R).expand(n, n, batch, seq)
            A = torch.cat([torch.sigmoid(a)[:, None], A_r.transpose(0, 1)], dim=1)
            # contiguous for each token: `mix` then takes a fifteenth of the time
            return A.movedim(1, -1).contiguous(), 2 * torch.sigmoid(b)[..., None]


class MHC(ManyStreams, name="mhc", label="mHC", paper="arXiv:2512.24880", static=True):
    """h = A_mᵀ H, H <- A_r H + B G(LN(h)), A_r doubly stochastic.  Xie et al. 2025, 2512.24880.

    Manifold-constrained hyper-connections: H, (n, d) for a token, is at first x_0 in every stream;
    at the end F = LN(the sum of all streams).  A_m, A_r and B are functions of H at every sublayer
    (section 4).  A_r results from `iterations` steps of Sinkhorn and Knopp, so that A_r H is no
    longer than H and has the same mean; A_m is in (0, 1), B in (0, 2).

    At the start a sublayer mainly reads and writes stream k mod n, k = 0, 1, … counting the
    sublayers of the stack.  Memory and the stream between layers: as with hyper-connections.

    mixing: A_r by Sinkhorn and Knopp; 'identity': A_r = I, so that sublayers alone connect the
    streams; 'permutations': a convex sum of all n! permutations (mHC-lite, arXiv:2601.05732), for
    n <= 5; 'kronecker': a Kronecker product of 2 x 2 matrices (KromHC, arXiv:2601.21579), n = 2^K.
    Both are after the authors' code and start as Sinkhorn's.  'cayley': A_r orthogonal, from I, by
    the map of JPmHC (arXiv:2602.18308); the streams then keep their joint norm at any depth.
    """

    iterations: Annotated[int, Field(ge=1, description="of Sinkhorn and Knopp")] = 20
    mixing: Annotated[
        Literal["sinkhorn", "identity", "permutations", "kronecker", "cayley"],
        Field(description="how A_r becomes doubly stochastic, I, or orthogonal"),
    ] = "sinkhorn"

    @classmethod
    def mapped(cls) -> int:
        n = cls.streams
        of_mixing = {
            "sinkhorn": n * n, "identity": 0, "permutations": math.factorial(min(n, 5)),
            "kronecker": 2 * (n.bit_length() - 1), "cayley": n * n,
        }  # fmt: skip
        return 2 * n + of_mixing[cls.mixing]

    @classmethod
    def extra_flops(cls, sizes: StackSizes) -> int:
        """Return the FLOPs of hyper-connections, and those of the sum over permutations.

        Permutations are constant, so that the backward pass of this sum has one product less.
        """
        tokens = sizes.sublayers * sizes.batch * sizes.seq * (cls.mixing == "permutations")
        of_permutations = 2 * tokens * math.factorial(min(cls.streams, 5)) * cls.streams**2
        return super().extra_flops(sizes) + of_permutations

    def setup(self, parts: Parts) -> None:
        n = self.streams
        allowed = {"permutations": n <= 5, "kronecker": n.bit_count() == 1}
        if not allowed.get(self.mixing, True):
            text = "at most 5" if self.mixing == "permutations" else "a power of 2"
            raise ConfigError(
                f"model.scheme_options.streams: found {n}, allowed {text} with mixing: "
                f"{self.mixing}",
                key="model.scheme_options.streams",
            )
        super().setup(parts)

    def connections(self, k: int, parts: Parts) -> nn.Module:
        n = self.streams
        mixing = MIXINGS[self.mixing](n, self.iterations)
        return Constrained(k, n, parts, mixing)

    @classmethod
    def extra_memory(cls, sizes: StackSizes) -> int:
        """Return the bytes of the streams and of the steps of Sinkhorn and Knopp, in fp32."""
        iterations = cls.iterations if cls.mixing == "sinkhorn" else 1
        steps = 2 * iterations * cls.streams**2 * sizes.batch * sizes.seq * 4
        return super().extra_memory(sizes) + sizes.sublayers * steps


class FracConnections(
    Scheme, name="frac_connections", label="Frac-connections", paper="arXiv:2503.14125", static=True
):
    """h = Yᵀ H, H <- Aᵀ H + B * G(LN(h)), H the stream in m parts.  Zhu et al. 2025, 2503.14125.

    Section 4: hyper-connections between fractions of the stream, H (m, d/m) for a token.  The
    stream becomes no wider.  Both h and the output of G are as wide as the stream, and are divided
    likewise.  Y (m, m), A (m, m) and B (m, 1) of a sublayer, all trained, start as Pre-LN:
    Y = A = I, B = (1, …, 1).  The stack has a final norm.

    dynamic: adds s tanh(LN(H) W) to each of them, with W = 0 and s = 0.01 at the start and a norm
    over the d/m numbers of a part.  Y and A share one number s, and B has another, as in the
    paper's appendix A.  Weight decay applies to none of them; the authors decay W.
    """

    final_norm = True
    mixes_streams = True
    extra_streams = 6
    fractions: Annotated[int, Field(ge=1, le=64, description="m, a divisor of d_model")] = 4
    dynamic: Annotated[
        bool, Field(description="connections depend on the stream, not only on training")
    ] = True

    def setup(self, parts: Parts) -> None:
        width, rest = divmod(parts.d_model, self.fractions)
        if rest:
            raise ConfigError(
                f"model.scheme_options.fractions: found {self.fractions}, allowed a divisor of "
                f"model.d_model, {parts.d_model}",
                key="model.scheme_options.fractions",
            )
        begin = torch.eye(self.fractions).repeat(1, 2)  # [Y | A]
        self.add_per_sublayer("connections", lambda: Connections(begin, width, parts, self.dynamic))

    @classmethod
    def extra_flops(cls, sizes: StackSizes) -> int:
        """Return the FLOPs of [Y | A]ᵀ H, and of the map from H to the connections."""
        each = 2 * cls.fractions + (2 * cls.fractions + 1) * cls.dynamic
        return 2 * each * sizes.sublayers * sizes.numbers

    def layer(self, x: Tensor, *sublayers: Sublayer) -> Tensor:
        every = self.per_sublayer("connections")
        for G, norms, connections in zip(sublayers, self.norm_functions, every, strict=True):
            H = self.apart(x)
            A, B = connections(H)
            h, mixed = mix(A, H).chunk(2)
            x = self.residual(join_parts(h), G, *norms, mixed=mixed, B=B)
        return x

    def residual(self, x: Tensor, G: Sublayer, norm: Norm, *, mixed: Tensor, B: Tensor) -> Tensor:
        """Return the stream, given h (here x) and the parts mixed by A, (m, batch, seq, d/m)."""
        return join_parts(mixed + B * self.apart(G(norm(x))))

    def apart(self, x: Tensor) -> Tensor:
        """Divide the stream into parts: (batch, seq, d) -> (m, batch, seq, d/m)."""
        return x.unflatten(-1, (self.fractions, -1)).movedim(2, 0)


def join_parts(H: Tensor) -> Tensor:
    """Join the parts of the stream: (m, batch, seq, d/m) -> (batch, seq, d)."""
    return H.movedim(0, 2).flatten(2)


def mix(A: Tensor, H: Tensor) -> Tensor:
    """Return Aᵀ H for every token, (k, batch, seq, d), in fp32 even under autocast.

    A: (n, batch, seq, k), or (n, 1, 1, k).
    H: (n, batch, seq, d).  In bf16 every sublayer would round the streams, which other schemes keep
        in fp32.
    """
    with in_full_precision(H):
        return torch.einsum("ibsj,ibsd->jbsd", A, H)
