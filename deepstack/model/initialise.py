"""Initialisation of all parameters, from one table of distributions by role."""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepstack import config as conf
from deepstack.config.roles import MATRICES
from deepstack.model.banks import Bank, Banks
from deepstack.model.sublayers import JOINED
from deepstack.schemes import StackScheme

# numbers of random streams: 8 * layer + index for a matrix in a layer, the index alone outside
IN_LAYERS = ("q", "k", "v", "o", "w1", "w2")
OUTSIDE = ("embedding", "position", "head.weight", "head.dense")

# under 'init.qkv: packed' Xavier treats three of them as one matrix
QKV = ("q", "k", "v", "cross_q", "cross_k", "cross_v")

# the values of named starts; a numeric start is its own value
CONSTANTS: dict[Any, Any] = {"zero": 0.0, "one": 1.0}


def normal(matrix: Tensor, scale: float, rng: torch.Generator) -> None:
    """Fill a matrix from N(0, scale^2)."""
    matrix.normal_(0.0, scale, generator=rng)


def uniform(matrix: Tensor, scale: float, rng: torch.Generator) -> None:
    """Fill a matrix from U(-sqrt(3) scale, sqrt(3) scale), whose standard deviation is scale."""
    matrix.uniform_(-math.sqrt(3) * scale, math.sqrt(3) * scale, generator=rng)


# standard deviation of a standard normal cut at -2 and 2: sqrt(1 - 4 phi(2) / (2 Phi(2) - 1))
TRUNCATED_STD = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))


def truncated_normal(matrix: Tensor, scale: float, rng: torch.Generator) -> None:
    """Fill from a normal cut at two standard deviations; after the cut its deviation is scale."""
    if not scale:
        matrix.zero_()  # torch divides by it
        return
    std = scale / TRUNCATED_STD
    torch.nn.init.trunc_normal_(matrix, 0.0, std, -2 * std, 2 * std, generator=rng)


def orthogonal(matrix: Tensor, scale: float, rng: torch.Generator) -> None:
    """Fill a matrix with scale * Q, where Q is drawn uniformly from the orthogonal matrices.

    Q Qᵀ = 1 or Qᵀ Q = 1, whichever is smaller.  Saxe et al. 2013, arXiv:1312.6120.
    """
    long, short = max(matrix.shape), min(matrix.shape)
    q = torch.empty(long, short, device=matrix.device)  # torch draws a wide one differently
    torch.nn.init.orthogonal_(q, scale, generator=rng)
    matrix.copy_(q if matrix.shape == q.shape else q.t())


def zero_identity(matrix: Tensor, scale: float, rng: torch.Generator) -> None:
    """Fill with scale * I if n_out <= n_in, else with scale * I H I / sqrt(p); nothing is random.

    I: a rectangular matrix with ones on its diagonal; H: (p, p), the Hadamard matrix, p the least
    power of two that is n_out or more.  The columns are orthonormal if p = n_out.  ZerO, Zhao et
    al. 2021, arXiv:2110.12661, algorithm 1, with the factor 1 / sqrt(p) of its authors' code.
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
    """The distribution of initial matrices: its scale with gain 1, and its fill function.

    fill takes the matrix, gain * scale and a generator.
    """

    scale: Callable[[conf.Init, int, int], float]
    fill: Callable[[Tensor, float, torch.Generator], None]


# Standard deviations of a matrix (n_out, n_in) with gain 1.  Xavier: Glorot & Bengio 2010, equation
# 12, or by `init.fan`.  Kaiming preserves variance under relu: He et al. 2015, 1502.01852.
def xavier(init: conf.Init, n_in: int, n_out: int) -> float:
    """Return sqrt(2 / (n_in + n_out)), or 1 / sqrt(n_in) under 'init.fan: in'."""
    return fan_in(init, n_in, n_out) if init.fan == "in" else math.sqrt(2 / (n_in + n_out))


def kaiming(init: conf.Init, n_in: int, n_out: int) -> float:
    """Return sqrt(2 / n_in)."""
    return math.sqrt(2 / n_in)


def fan_in(init: conf.Init, n_in: int, n_out: int) -> float:
    """Return 1 / sqrt(n_in), which preserves variance under the matrix product alone."""
    return math.sqrt(1 / n_in)


def one(init: conf.Init, n_in: int, n_out: int) -> float:
    """Return 1, for distributions whose matrix or product has a fixed scale."""
    return 1.0


DISTRIBUTIONS: dict[str, Distribution] = {
    "xavier_normal": Distribution(xavier, normal),
    "xavier_uniform": Distribution(xavier, uniform),
    "kaiming_normal": Distribution(kaiming, normal),
    "kaiming_uniform": Distribution(kaiming, uniform),
    "orthogonal": Distribution(one, orthogonal),
    "truncated_normal": Distribution(xavier, truncated_normal),
    "normal": Distribution(lambda init, n_in, n_out: init.std, normal),
    "zero_identity": Distribution(one, zero_identity),
    "ntk": Distribution(one, normal),
    "torch_linear": Distribution(lambda init, n_in, n_out: math.sqrt(1 / (3 * n_in)), uniform),
}
# the distributions that differ outside the sublayers, where nothing divides the products
ELSEWHERE = {"ntk": Distribution(fan_in, normal)}


@torch.no_grad()
def initialise(
    banks: Banks, model: conf.Model, schemes: Mapping[str, StackScheme], seed: int
) -> None:
    """Draw every parameter: matrices times the scheme's gain, tables N(0, 1/d), the rest 0 or 1.

    | start  | roles                                  | distribution                              |
    |--------|----------------------------------------|-------------------------------------------|
    | matrix | q k v o w1 w2 w3, cross_q … cross_o, …  | gain * that of `init.distribution`:       |
    |        |                                        | Xavier, std gain * sqrt(2/(n_in + n_out)) |
    | table  | embedding, position, a separate head   | N(0, gain^2/d_model)                      |
    | zero   | bias, norm_bias                        | 0                                         |
    | one    | norm_gain                              | 1                                         |
    | number | other parameters of schemes and norms  | that number                               |

    `init.distribution` is one of DISTRIBUTIONS; 'init.fan: in' makes Xavier's standard deviation
    gain / sqrt(n_in).  'init.qkv: packed' counts 3 n_out for q, k and v, also in cross-attention:
    1/sqrt(2) of the deviation.  fairseq and `nn.MultiheadAttention` do this, because they store the
    three in one matrix.

    'ntk' is N(0, gain^2), and the sublayers divide their products by sqrt(n_in)
    (`deepstack.model.sublayers.scaled_linear`).  Tables are unchanged.  Nothing divides the product
    of a matrix of the head or of the scheme; it is drawn from N(0, gain^2/n_in).

    'torch_linear' is the start of `nn.Linear` (kaiming_uniform with a = sqrt(5)), of variance
    gain^2/(3 n_in), which torchscale's DeepNorm scales.  The biases of the sublayers start from the
    same distribution as their matrices, gain included, as they do there.

    Every matrix has its own random stream, numbered by seed, role and layer.  So a layer starts
    from the same numbers at every depth and under every scheme, except for the gain, and
    comparisons are paired.
    """
    first = next(iter(schemes))
    start = DISTRIBUTIONS[model.init.distribution]
    elsewhere = ELSEWHERE.get(model.init.distribution, start)
    for bank in banks:
        for role, tensors in bank.by_role():
            rows = [row for tensor in tensors for row in tensor]
            for layer, (row, begin) in enumerate(zip(rows, bank.starts, strict=True), start=1):
                if begin not in ("matrix", "table"):
                    row.fill_(CONSTANTS.get(begin, begin))
                    continue
                gain = schemes[bank.stack or first].gain(role, layer if bank.in_layers else 0)
                rng = generator(seed, stream_number(bank, role, layer, first), row.device)
                if begin == "table":
                    row.normal_(0.0, gain / math.sqrt(row.shape[-1]), generator=rng)
                    continue
                n_out, n_in = row.shape
                packed = 3 if model.init.qkv == "packed" and role in QKV else 1
                # NTK divides the products of sublayers alone
                rule = start if role in MATRICES else elsewhere
                rule.fill(row, gain * rule.scale(model.init, n_in, packed * n_out), rng)
    if model.init.distribution == "torch_linear":
        draw_biases(banks, schemes, seed)


def draw_biases(banks: Banks, schemes: Mapping[str, StackScheme], seed: int) -> None:
    """Draw the biases of all sublayers from U(-gain/sqrt(n_in), gain/sqrt(n_in))."""
    by_key = {bank.key: bank for bank in banks}
    for bank in banks:
        if bank.roles != ("bias",) or bank.stack is None:
            continue
        path, _, name = bank.key.removesuffix("_bias").rpartition(".")
        parts = JOINED.get(name, (name,)) if f"{path}.{name}" not in by_key else (name,)
        matrices = [by_key[f"{path}.{part}"] for part in parts]
        roles = [role for matrix in matrices for role in matrix.roles]
        bound = matrices[0].shape[1] ** -0.5
        values = bank.values().clone()
        for layer, row in enumerate(values, start=1):
            for role, piece in zip(roles, row.chunk(len(roles)), strict=True):
                gain = schemes[bank.stack].gain(role, layer)
                rng = generator(seed, hash_of(f"{bank.stack}/{role}_bias/{layer}"), row.device)
                piece.uniform_(-bound, bound, generator=rng).mul_(gain)
        bank.copy_(values)


def stream_number(bank: Bank, role: str, layer: int, first: str) -> int:
    """Return the number of a matrix's random stream: a fixed number or a hash of its name.

    The six matrices of a layer of the `first` stack, encoder or decoder, and the matrices in
    OUTSIDE have fixed numbers.  Other matrices have a hash: matrices of a scheme, and matrices of a
    decoder beside an encoder, by role, so that it is independent of how they share tensors.
    """
    if bank.stack == first and role in IN_LAYERS:
        return 8 * layer + IN_LAYERS.index(role)
    if not bank.in_layers and bank.key in OUTSIDE:
        return OUTSIDE.index(bank.key)
    named = bank.stack if role in MATRICES else bank.key
    return hash_of(f"{named}/{role}/{layer}")


def hash_of(name: str) -> int:
    """Return a hash of a name, 32 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def generator(seed: int, number: int, device: torch.device) -> torch.Generator:
    """Return random stream `number` of a seed; the sum fits the 32 bits of a CPU generator."""
    return torch.Generator(device).manual_seed((hash_of(str(seed)) + number) % 2**32)
