"""The start of every parameter: mean, variance and gain, with intervals that hold their coverage.

A matrix of n independent entries of deviation sigma and kurtosis K has a sample variance s^2 with
s^2/sigma^2 ~ chi^2_v / v, v = 2 n / (K - 1): exactly for a normal distribution, for large n for
others.  Each interval has the level LEVEL over the number of all tests, so that a correct block
fails one of them in at most 1 of 1000 draws (Bonferroni's inequality needs no independence).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepstack.tools.conform.block import Block
from deepstack.tools.conform.reference import Reference
from deepstack.tools.conform.weights import Key

LEVEL = 1e-3  # chance that a correct block fails any of the tests
SEEDS = 16
MATRIX = ("matrix", "table")


class Start(NamedTuple):
    """One test: the values of a parameter over seeds at a depth, in one layer or in all (0).

    ratio: deviation over the reference's, with its interval low to high; of a constant parameter, 1
        if all values are as in the reference.
    mean: mean over deviation, allowed up to `most`.
    """

    name: str
    depth: int
    layer: int
    ratio: float
    low: float
    high: float
    mean: float
    most: float
    found: float
    expected: float

    @property
    def holds(self) -> bool:
        """Whether the reference's deviation lies in the interval, and the mean near 0."""
        return self.low <= 1.0 <= self.high and abs(self.mean) <= self.most


def spread(values: Tensor, kurtosis: float, level: float) -> tuple[float, float, float, float]:
    """Return sample deviation, its interval at 1 - level, and the largest |mean| / deviation.

    values: independent entries.
    kurtosis: the distribution's; the sample's counts if larger.
    """
    from scipy.special import chdtri, ndtri

    n = values.numel()
    centred = values - values.mean()
    variance = float(centred.square().sum() / (n - 1))
    if variance == 0:
        return 0.0, 0.0, 0.0, 0.0
    sample = float(centred.pow(4).mean() / centred.square().mean() ** 2)
    freedom = 2 * (n - 1) / (max(sample, kurtosis, 1.5) - 1)
    low, high = (float(chdtri(freedom, p)) / freedom for p in (1 - level / 2, level / 2))
    s = math.sqrt(variance)
    return s, s / math.sqrt(high), s / math.sqrt(low), float(-ndtri(level / 2)) / math.sqrt(n)


def sample_starts(
    block: Block, scheme: str, depths: Sequence[int], settings: Mapping[str, object]
) -> dict[int, tuple[Reference, dict[Key, Tensor]]]:
    """Return, by depth, a reference and the block's start: parameter -> values (draws, numbers).

    Draws that are equal count once: a block that draws from a fixed seed has one.
    """
    drawn = {}
    for depth in depths:
        reference = Reference(scheme, depth, settings)
        builds = [block.weights(reference, seed=1000 + seed) for seed in range(SEEDS)]
        values = {
            key: torch.unique(torch.stack([own.value(key) for own in builds]), dim=0)
            for key in builds[0].pieces
        }
        drawn[depth] = reference, values
    return drawn


def check_starts(
    drawn: Mapping[int, tuple[Reference, dict[Key, Tensor]]], level: float = LEVEL
) -> list[Start]:
    """Return a test for every parameter, depth and layer, and one for all layers of a matrix.

    Parameters that the scheme starts from data, and matrices that its constraint changes, are
    left out.
    """
    tests = [
        (name, depth, layer, reference, values)
        for depth, (reference, entries) in drawn.items()
        if not reference.stack.schemes[0].constrains
        for name, layer, values in with_all_layers(reference, entries)
        if not (reference.stack.schemes[0].reads_data and is_scheme(reference, name))
    ]
    each = level / (2 * max(1, len(tests)))
    return [
        one_start(name, depth, layer, reference, values, each)
        for name, depth, layer, reference, values in tests
    ]


def with_all_layers(
    reference: Reference, entries: Mapping[Key, Tensor]
) -> Iterator[tuple[str, int, Tensor]]:
    """Yield name, layer and values; those of all layers over the reference's deviation as 0."""
    pooled: dict[str, list[Tensor]] = {}
    for (name, layer), values in entries.items():
        yield name, layer, values
        if reference.entries[name, layer].start in MATRIX and layer:
            if sigma := reference.standard_deviation((name, layer)):
                pooled.setdefault(name, []).append(values.flatten() / sigma)
    for name, parts in pooled.items():
        if len(parts) > 1 and len({len(part) for part in parts}) == 1:
            # layers with equal starts count once
            yield name, 0, torch.unique(torch.stack(parts), dim=0).flatten()


def is_scheme(reference: Reference, name: str) -> bool:
    """Return whether a parameter is the scheme's own."""
    return any(e.role == "scheme" for (own, _), e in reference.entries.items() if own == name)


def one_start(
    name: str, depth: int, layer: int, reference: Reference, values: Tensor, level: float
) -> Start:
    """Return the test of one parameter at a level."""
    key = (name, layer) if (name, layer) in reference.entries else (name, 1)
    begin = reference.entries[key].start
    uniform = "uniform" in reference.config.model.init.distribution
    kurtosis = 1.8 if uniform else 3.0
    expected = 0.0
    if begin in MATRIX:
        pooled = layer == 0 and key[1] == 1
        expected = 1.0 if pooled else reference.standard_deviation(key)
    elif name.endswith(".bias") and reference.config.model.init.distribution == "torch_linear":
        expected, kurtosis = bias_deviation(reference, key), 1.8
    if expected:
        s, low, high, most = spread(values.flatten(), kurtosis, level)
        mean = float(values.mean()) / s if s else 0.0
        ratios = s / expected, low / expected, high / expected
        return Start(name, depth, layer, *ratios, mean, most, s, expected)
    target = reference.value(key).to(values)
    equal = bool(torch.allclose(values, target.expand_as(values), rtol=1e-5, atol=1e-7))
    found, wanted = float(values.mean()), float(target.mean())
    ratio = found / wanted if wanted else (1.0 if equal else float("inf"))
    ends = (1.0, 1.0) if equal else (ratio, ratio) if ratio != 1 else (2.0, 2.0)
    return Start(name, depth, layer, ratio, *ends, 0.0, 0.0, found, wanted)


def bias_deviation(reference: Reference, key: Key) -> float:
    """Return the deviation of a bias that starts as nn.Linear's, gain / sqrt(3 n_in); else 0."""
    role = key[0].removesuffix(".bias")
    if (role, key[1]) not in reference.entries:
        return 0.0
    n_in = reference.entries[role, key[1]].shape[1]
    return reference.scheme.gain(role, key[1]) / math.sqrt(3 * n_in)
