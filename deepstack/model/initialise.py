"""Initialisation: one table, role -> distribution, which is what the code loops over."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.model.transformer import places
from deepstack.parameters import Bank, Banks
from deepstack.schemes import Place, checked_gain, find_scheme, with_options

# what has a random stream: number 8 * layer + index in a layer, the index alone outside of them
IN_LAYERS = ("q", "k", "v", "o", "w1", "w2")
OUTSIDE = ("embedding", "position", "head.weight", "head.dense")

# the matrices of sublayers, whose products the NTK parameterisation divides by sqrt(n_in)
IN_SUBLAYERS = (*IN_LAYERS, "w3", "cross_q", "cross_k", "cross_v", "cross_o")

# under 'init.qkv: packed' Xavier sees three of them side by side
QKV = ("q", "k", "v", "cross_q", "cross_k", "cross_v")

# a start that is a number says so itself
CONSTANTS: dict[Any, Any] = {"zero": 0.0, "one": 1.0}

# standard deviation of a Xavier matrix (n_out, n_in) under gain 1
FANS: dict[str, Callable[[int, int], float]] = {
    "in_out": lambda n_in, n_out: math.sqrt(2 / (n_in + n_out)),
    "in": lambda n_in, n_out: math.sqrt(1 / n_in),
}


def xavier(init: conf.Init, n_in: int, n_out: int) -> float:
    """sqrt(2 / (n_in + n_out)), or what `init.fan` says.  Glorot & Bengio 2010, equation 12."""
    return FANS[init.fan](n_in, n_out)


def kaiming(init: conf.Init, n_in: int, n_out: int) -> float:
    """sqrt(2 / n_in), which keeps the variance through relu.  He et al. 2015, arXiv:1502.01852."""
    return math.sqrt(2 / n_in)


def fan_in(init: conf.Init, n_in: int, n_out: int) -> float:
    """1 / sqrt(n_in), which keeps the variance through the product alone."""
    return math.sqrt(1 / n_in)


def given(init: conf.Init, n_in: int, n_out: int) -> float:
    """`init.std`, whatever the size of the matrix."""
    return init.std


def one(init: conf.Init, n_in: int, n_out: int) -> float:
    """1: the matrix has a scale of its own, or its product has."""
    return 1.0


def normal(matrix: Tensor, scale: float, rng: torch.Generator) -> None:
    """N(0, scale^2)."""
    matrix.normal_(0.0, scale, generator=rng)


def uniform(matrix: Tensor, scale: float, rng: torch.Generator) -> None:
    """U(-sqrt(3) scale, sqrt(3) scale), whose standard deviation is scale."""
    matrix.uniform_(-math.sqrt(3) * scale, math.sqrt(3) * scale, generator=rng)


# of a standard normal cut at -2 and 2: sqrt(1 - 4 phi(2) / (2 Phi(2) - 1))
TRUNCATED_STD = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))


def truncated_normal(matrix: Tensor, scale: float, rng: torch.Generator) -> None:
    """A normal cut at two of its standard deviations, which is scale once it has been cut."""
    if not scale:
        matrix.zero_()  # torch divides by it
        return
    std = scale / TRUNCATED_STD
    torch.nn.init.trunc_normal_(matrix, 0.0, std, -2 * std, 2 * std, generator=rng)


def orthogonal(matrix: Tensor, scale: float, rng: torch.Generator) -> None:
    """scale * Q: Q Qᵀ = 1 or Qᵀ Q = 1, the smaller one, all such Q alike in probability.

    Saxe et al. 2013, arXiv:1312.6120.
    """
    long, short = max(matrix.shape), min(matrix.shape)
    drawn = torch.empty(long, short, device=matrix.device).normal_(generator=rng)
    q, r = torch.linalg.qr(drawn)
    q = q * r.diagonal().sign()  # else the signs depend on how QR is computed
    matrix.copy_(scale * (q if matrix.shape == q.shape else q.t()))


def zero_identity(matrix: Tensor, scale: float, rng: torch.Generator) -> None:
    """scale * I where n_out <= n_in, else scale * I H I / sqrt(p): nothing is drawn.

    I: a matrix with ones on its diagonal, rectangular; H: (p, p), Hadamard's, p the least power of
    two that is n_out or more; so the columns are orthonormal where p = n_out.  ZerO, Zhao et al.
    2021, arXiv:2110.12661, algorithm 1, with the factor 1 / sqrt(p) of its authors' code.
    """
    n_out, n_in = matrix.shape
    if n_out <= n_in:
        matrix.copy_(scale * torch.eye(n_out, n_in, device=matrix.device))
        return
    hadamard = torch.ones(1, 1, device=matrix.device)
    while len(hadamard) < n_out:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).to(hadamard), hadamard)
    matrix.copy_(scale * hadamard[:n_out, :n_in] / math.sqrt(len(hadamard)))


class Distribution(NamedTuple):
    """How a matrix starts: its scale under gain 1, and what fills it given gain * scale."""

    scale: Callable[[conf.Init, int, int], float]
    fill: Callable[[Tensor, float, torch.Generator], None]


DISTRIBUTIONS: dict[str, Distribution] = {
    "xavier_normal": Distribution(xavier, normal),
    "xavier_uniform": Distribution(xavier, uniform),
    "kaiming_normal": Distribution(kaiming, normal),
    "kaiming_uniform": Distribution(kaiming, uniform),
    "orthogonal": Distribution(one, orthogonal),
    "truncated_normal": Distribution(xavier, truncated_normal),
    "normal": Distribution(given, normal),
    "zero_identity": Distribution(one, zero_identity),
    "ntk": Distribution(one, normal),
}
# for matrices outside of the sublayers, where it is another: nothing divides their products
ELSEWHERE = {"ntk": Distribution(fan_in, normal)}


def initialise(banks: Banks, model: conf.Model, seed: int) -> None:
    """Draw every parameter: matrices times the scheme's gain, tables N(0, 1/d), the rest 0 or 1.

    | start  | roles                                  | distribution                              |
    |--------|----------------------------------------|-------------------------------------------|
    | matrix | q k v o w1 w2 w3, cross_q … cross_o, …  | gain * that of `init.distribution`:       |
    |        |                                        | Xavier, std gain * sqrt(2/(n_in + n_out)) |
    | table  | embedding, position, a separate head   | N(0, gain^2/d_model)                      |
    | zero   | bias, norm_bias                        | 0                                         |
    | one    | norm_gain                              | 1                                         |
    | number | what a scheme or a norm owns           | that number                               |

    `init.distribution` is one of DISTRIBUTIONS; 'init.fan: in' makes Xavier's standard deviation
    gain / sqrt(n_in).  'init.qkv: packed' counts 3 n_out for q, k and v, also in cross-attention:
    1/sqrt(2) of the deviation.  fairseq and `nn.MultiheadAttention` start so, because they keep the
    three in one matrix.

    'ntk' is N(0, gain^2), and the sublayers divide their products by sqrt(n_in)
    (`deepstack.model.sublayers.Parameterisation`); tables are as they always are, and a matrix of
    the head or of the scheme's own, whose product nothing divides, is drawn from N(0, gain^2/n_in).

    Every matrix has a random stream of its own, numbered by seed, role and layer: a layer starts
    from the same numbers whatever the depth and the scheme (its gain apart), so that comparisons
    are paired.
    """
    gain_of = gains(model)
    first = next(iter(gain_of))
    start = DISTRIBUTIONS[model.init.distribution]
    elsewhere = ELSEWHERE.get(model.init.distribution, start)
    with torch.no_grad():
        for bank in banks:
            for role, tensors in bank.by_role():
                rows = [row for tensor in tensors for row in tensor]
                for layer, row in enumerate(rows, start=1):
                    begin = bank.starts[layer - 1]
                    if begin not in ("matrix", "table"):
                        row.fill_(CONSTANTS.get(begin, begin))
                        continue
                    gain = gain_of[bank.stack or first](role, layer if bank.in_layers else 0)
                    rng = generator(seed, stream_number(bank, role, layer, first), row.device)
                    if begin == "table":
                        row.normal_(0.0, gain / math.sqrt(row.shape[-1]), generator=rng)
                        continue
                    n_out, n_in = row.shape
                    if model.init.qkv == "packed" and role in QKV:
                        n_out *= 3
                    own = start if role in IN_SUBLAYERS else elsewhere
                    own.fill(row, gain * own.scale(model.init, n_in, n_out), rng)


def gains(model: conf.Model) -> dict[str, Callable[[str, int], float]]:
    """(role, layer) -> the scheme's gain, for each stack; layer 0 for what lies outside of them."""
    scheme, options = find_scheme(model.scheme, model.scheme_options)
    known = {"qkv": model.init.qkv} | options

    def of(place: Place) -> Callable[[str, int], float]:
        gain = checked_gain(scheme, with_options(scheme.gain, known | {"place": place}))
        return lambda role, layer: gain(role, layer, place.depth)

    return {side: of(place) for side, place in places(model).items()}


def stream_number(bank: Bank, role: str, layer: int, first: str) -> int:
    """The random stream of a matrix: its number, or a hash of its name.

    Numbered are the six of a layer of the `first` stack, whether encoder or decoder, and the
    tables.  Named are those that a scheme brings along and those of a decoder beside an encoder,
    whose roles say which: they may share a tensor or not.
    """
    if bank.stack == first and role in IN_LAYERS:
        return 8 * layer + IN_LAYERS.index(role)
    if not bank.in_layers and bank.key in OUTSIDE:
        return OUTSIDE.index(bank.key)
    named = bank.stack if role in IN_SUBLAYERS else bank.key
    digest = hashlib.sha256(f"{named}/{role}/{layer}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def generator(seed: int, number: int, device: torch.device) -> torch.Generator:
    """Random stream `number` of a seed.  A CPU generator keeps 32 bits, so numbers are added."""
    base = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:4], "little")
    return torch.Generator(device).manual_seed((base + number) % 2**32)
